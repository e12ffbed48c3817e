"""Runs the steps of a request. A step starts as soon as its inputs are there, and several run at the same time.

A :class:`StepsEngine` stands around the engine that calls the models. Whatever ends a request ends its running calls.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import msgspec.structs
import numpy as np

from app.codecs.kinds import as_datatype, declared_shape, shape_text
from app.core.answer import joined_rows, ranges_of
from app.core.engine import Engine, Put, merged
from app.core.errors import ContractViolation, GatewayError
from app.core.inference import (
    BYTES,
    Deadline,
    InferenceRequest,
    InferenceResponse,
    KeptMemory,
    RequestedOutput,
    StepOutcome,
    StepTimes,
    Tensor,
)
from app.core.model import TensorSpec
from app.steps.plan import PENDING, SKIPPED, VERSION, Plan, PlannedStep, Values, tensor_of

_ONE = range(1)


class StepSlot(Protocol):
    def leave(self, error: BaseException | None = None) -> None: ...


EnterStep = Callable[[PlannedStep, Deadline], Awaitable[StepSlot]]
"""Waits for a slot of a step's model. Raises TooManyRequests or DeadlineExceeded."""
Counted = Callable[[str, str, str], None]
"""Is called with the pipeline, the step, and ``ok``, ``skipped``, ``failed``, ``cancelled`` or ``exit``."""


class StepsEngine(Engine):
    """Only requests of pipelines with a :class:`Plan` have steps; all others pass unchanged."""

    def __init__(self, engine: Engine, enter: EnterStep, counted: Counted = lambda *_: None) -> None:
        self.engine, self.enter, self.counted = engine, enter, counted

    def infer(self, request: InferenceRequest, deadline: Deadline) -> Coroutine[Any, Any, InferenceResponse]:
        run = self._run_of(request, deadline)
        return self.engine.infer(request, deadline) if run is None else run.answer()

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        run = self._run_of(request, deadline)
        return self.engine.infer_stream(request, deadline) if run is None else merged(run.stream)

    def _run_of(self, request: InferenceRequest, deadline: Deadline) -> "_Run | None":
        times = request.steps
        if times is None:
            return None
        plan: Plan = times.plan
        fields = {name: tensor_of(name, value) for name, value in request.parameters.items() if name in plan.fields}
        values = plan.defaults | fields | {tensor.name: tensor for tensor in request.inputs}
        waiting = [step for step in plan.order if not step.streams]
        request = msgspec.structs.replace(request, inputs=(), extensions=())
        return _Run(self, plan, times, request, deadline, values, waiting)


@dataclass(slots=True, eq=False)
class _Run:
    """The steps of one request, or those behind one response of a decoupled step."""

    engine: StepsEngine
    plan: Plan
    times: StepTimes
    request: InferenceRequest
    """Without inputs and extensions."""
    deadline: Deadline
    values: Values
    """What is there."""
    waiting: list[PlannedStep]
    done: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    """The outputs of a stream that were put."""
    copies: bool = False
    """Whether the values may lie in memory that is given back."""
    has_slot: bool = False
    """Whether the calls run in the slot of a stream: a wait for another one could last for ever."""
    put: Put | None = field(default=None, init=False)
    exit: str | None = field(default=None, init=False)
    tasks: dict[asyncio.Task[Values], PlannedStep] = field(default_factory=dict, init=False)
    kept: dict[str, KeptMemory] = field(default_factory=dict, init=False)
    """The memory of a step's outputs."""
    responded: set[str] = field(default_factory=set, init=False)
    """The decoupled steps that had a response."""

    async def answer(self) -> InferenceResponse:
        """Raises the error of a step that is not optional."""
        try:
            await self._run()
            return InferenceResponse(self._outputs(), version=VERSION, early_exit=self.exit)
        finally:
            self.values.clear()  # the memory must have no references
            for kept in self.kept.values():
                kept.release()

    async def stream(self, put: Put) -> None:
        """Puts the answer of each response of the decoupled steps, and at the end what is left."""
        self.put = put
        await put(await self.answer())

    # Order

    async def _run(self) -> None:
        """Runs all steps, until the pipeline ends. Raises the first error."""
        self._settle_races()  # a tensor of the request may be the first
        try:
            ready = self._ready()
            while self.exit is None and (ready or self.tasks):
                if len(ready) == 1 and not self.tasks:  # a chain needs no tasks
                    self._take(ready[0], await self._called(ready[0]))
                else:
                    self.tasks |= {asyncio.create_task(self._called(step)): step for step in ready}
                    ended, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        step = self.tasks.pop(task)
                        self._take(step, {} if task.cancelled() else task.result())
                ready = self._ready()
        finally:
            for task in self.tasks:
                task.cancel()
            if self.tasks:
                await asyncio.gather(*self.tasks, return_exceptions=True)
            self.tasks.clear()  # their errors refer to this object

    def _ready(self) -> list[PlannedStep]:
        """Takes the steps that can run now. Notes those that are skipped, and the end of the pipeline."""
        ready, pending = list[PlannedStep](), list[PlannedStep]()
        for step in self.waiting:  # each behind those that it waits for; a skipped one may add those behind a stream
            verdict = step.verdict(self.values, self.done)
            if verdict == PENDING:
                pending.append(step)
            elif not verdict:
                self._note(step, "skipped")
                self._take(step, {})
            elif step.spec.exit is None:
                ready.append(step)
            else:
                self._note(step, "exit")
                self.exit = step.spec.exit
                return []
        self.waiting = pending
        return ready

    def _take(self, step: PlannedStep, outputs: Values) -> None:
        """Notes what a step wrote. What it did not write is missing for good."""
        self.done.add(step.name)
        self.values |= outputs or dict.fromkeys(step.outputs)
        if step.config.decoupled and step.name not in self.responded:  # the steps behind it may have other sources
            silent = self.done - self.responded
            self.waiting += [each for each in self.plan.order if step.name in each.streams <= silent]
        self._settle_races()
        for name, kept in self.kept.items():
            if kept.releases:
                self.copies = True
                if self.plan.read_by[name] <= self.done:
                    kept.release()

    def _settle_races(self) -> None:
        for race, ended in self.plan.races.items():
            found = {name: self.values.get(name, PENDING) for name in race.names}
            winner = next((name for name, each in found.items() if isinstance(each, Tensor)), None)
            if race.text not in self.values and (winner is not None or PENDING not in found.values()):
                self.values[race.text] = None if winner is None else self.values[winner]
                useless = frozenset() if winner is None else ended[winner]
                for step in [each for each in self.waiting if each.name in useless]:
                    self.waiting.remove(step)
                    self._take(step, {})
                for task, step in self.tasks.items():
                    if step.name in useless:
                        task.cancel()

    def _outputs(self) -> dict[str, Tensor]:
        """What the answer has that was not put before."""
        outputs = {}
        for name, source in self.plan.answers.items():
            found = source.look(self.values)
            if isinstance(found, Tensor) and name not in self.written:
                outputs[name] = Tensor(name, found.datatype, found.array.copy() if self.copies else found.array)
        if self.plan.reports_skipped and (self.put is None or self.skipped or outputs):
            outputs[SKIPPED] = Tensor(SKIPPED, BYTES, np.asarray([*map(str.encode, self.skipped)], object))
        return outputs

    # Calls

    async def _called(self, step: PlannedStep) -> Values:
        """The outputs of a step. Raises GatewayError, unless the step is optional."""
        deadline, timeout_s, began = self.deadline, step.spec.timeout_s, perf_counter()
        outcome: StepOutcome = "cancelled"
        if timeout_s is not None:
            deadline = Deadline(min(deadline.expires_at, Deadline.after(timeout_s).expires_at))
        try:
            outputs = await (self._call if step.spec.each is None else self._call_rows)(step, deadline)
            outcome = "ok"
            return outputs
        except GatewayError as exc:
            outcome = "failed"
            is_behind = exc.failed_step not in ("", step.name)  # a step that runs for each response of this one
            if not step.spec.optional or is_behind or self.deadline.has_passed:
                exc.failed_step = exc.failed_step or step.name
                raise
            exc.forget_frames()  # they hold the inputs
            self.skipped.append(step.name)
            return {}
        finally:
            self._note(step, outcome, perf_counter() - began)

    def _note(self, step: PlannedStep, outcome: StepOutcome, seconds: float = 0.0) -> None:
        self.engine.counted(self.plan.name, step.name, outcome)
        self.times.add(step.name, outcome, seconds)

    async def _call_rows(self, step: PlannedStep, deadline: Deadline) -> Values:
        """The outputs of all rows of ``each``, in their order. Raises the first error."""
        found = next(source.look(self.values) for _, source in step.inputs if step.spec.each in source.names)
        assert isinstance(found, Tensor)
        parts = ranges_of(len(found.array), step.config.max_batch_size or 1)
        if len(parts) == 1:
            return await self._call(step, deadline, parts[0])
        pieces: list[Values] = [{} for _ in parts]
        waiting = iter(enumerate(parts))

        async def work() -> None:
            for index, items in waiting:
                pieces[index] = await self._call(step, deadline, items)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(step.spec.in_flight, len(parts))):
                    group.create_task(work())
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        return {name: _joined(spec, [each[name] for each in pieces]) for name, spec in step.outputs.items()}

    async def _call(self, step: PlannedStep, deadline: Deadline, items: range = _ONE) -> Values:
        """One call of a step's model, in a slot of its own."""
        request = self._request_of(step, items)
        infer = partial(self._relay, step) if step.config.decoupled else self.engine.engine.infer
        slot = None if self.has_slot else await self.engine.enter(step, deadline)
        try:
            response = await infer(request, deadline)
        except BaseException as exc:
            if slot is not None:
                slot.leave(exc)
            raise
        if slot is not None:
            slot.leave()
        return _written(step, response, items)

    def _request_of(self, step: PlannedStep, items: range) -> InferenceRequest:
        """``items``: the rows of ``each``; all other inputs are repeated for each of them."""
        has_batch, inputs = step.config.max_batch_size > 0, []
        for tensor, source in step.inputs:
            found = source.look(self.values)
            if not isinstance(found, Tensor):
                continue
            array = found.array
            if step.spec.each in source.names:
                array = array[items.start : items.stop] if has_batch else array[items.start]
            elif has_batch:
                array = array[None] if len(items) == 1 else np.broadcast_to(array, (len(items), *array.shape))
            inputs.append(Tensor(tensor.name, tensor.datatype, array))
        self.times.calls += 1
        return msgspec.structs.replace(
            self.request,
            model=step.config.name,
            version=step.spec.version,
            inputs=tuple(inputs),
            outputs=tuple([RequestedOutput(each.name) for each in step.outputs.values()]),
            request_id=f"{self.request.request_id}.{step.name}.{self.times.calls}",
            idempotent=self.request.idempotent or step.spec.idempotent,
            takes_traceparent=step.takes_traceparent,
            ends_by_hook=False,
            extensions=(self.kept.setdefault(step.name, KeptMemory()),),
        )

    # Streams

    async def _relay(self, step: PlannedStep, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        """Reads a stream. For each response runs the steps behind it, and puts the answer. At last there is nothing."""
        assert self.put is not None
        anew = {name for names in self.plan.of_stream.values() for name in names}
        others = dict.fromkeys(anew - self.plan.of_stream[step.name])  # not part of what is behind its responses
        # The outputs that are the same for all responses are put once.
        lasting = {name for name, source in self.plan.answers.items() if anew.isdisjoint(source.names)}
        behind = [each for each in self.plan.order if step.name in each.streams]
        async with aclosing(self.engine.engine.infer_stream(request, deadline)) as responses:
            async for response in responses:
                if not response.outputs:
                    continue
                self.responded.add(step.name)
                values, done = self.values | others | _written(step, response, _ONE), {*self.done, step.name}
                run = replace(self, values=values, waiting=[*behind], done=done, has_slot=True)
                self.skipped = []
                answer = await run.answer()
                self.written |= answer.outputs.keys() & lasting
                await self.put(
                    msgspec.structs.replace(response, outputs=answer.outputs, version=VERSION, is_final=False)
                )
                if answer.early_exit is not None:
                    self.exit = answer.early_exit
                    break
        return InferenceResponse({})


def _written(step: PlannedStep, response: InferenceResponse, items: range) -> Values:
    """The outputs in their declared form, with rows only for ``each``.

    Raises ContractViolation if the model wrote another shape or type.
    """
    has_batch, values = step.config.max_batch_size > 0, Values.fromkeys(step.outputs)
    for name, spec in step.outputs.items():
        tensor = response.outputs.get(spec.name)
        if tensor is None:
            continue
        array, dims = tensor.array, (len(items), *spec.dims) if has_batch else spec.dims
        if spec.is_typed:
            shape = declared_shape(array.shape, dims)
            typed = array if tensor.datatype == spec.datatype else as_datatype(array, spec.datatype)
            if shape is None or typed is None:
                text = f"Output '{spec.name}' is {tensor.datatype} {shape_text(array.shape)}; {spec.datatype} "
                raise ContractViolation(f"{text}{shape_text(dims)} is declared.", tensor=spec.name)
            array = typed if typed.shape == shape else typed.reshape(shape)
        if has_batch is (step.spec.each is None):
            array = array[0] if has_batch else array[None]
        values[name] = Tensor(spec.name, spec.datatype if spec.is_typed else tensor.datatype, array)
    return values


def _joined(spec: TensorSpec, pieces: Sequence[Tensor | None]) -> Tensor | None:
    """Raises ContractViolation if only some rows have the output, or rows of several shapes."""
    arrays = [each.array for each in pieces if each is not None]
    if pieces and not arrays:
        return None
    rows = joined_rows(arrays) if arrays else Tensor.empty(spec.name, spec.datatype, spec.dims).array
    if len(arrays) < len(pieces) or not isinstance(rows, np.ndarray):
        raise ContractViolation(f"The rows of '{spec.name}' have several shapes, or are missing.", tensor=spec.name)
    return Tensor(spec.name, spec.datatype, rows)
