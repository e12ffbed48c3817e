"""Runs the steps of a request. A step starts as soon as its inputs are there, and several run at the same time.

A :class:`StepsEngine` stands around the engine that calls the models. Whatever ends a request ends its running calls.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from app.codecs.kinds import as_datatype, declared_shape, shape_text
from app.core.engine import Engine, Put, merged
from app.core.errors import ContractViolation, GatewayError
from app.core.inference import (
    BYTES,
    DTYPE_BY_DATATYPE,
    Array,
    Deadline,
    InferenceRequest,
    InferenceResponse,
    KeptMemory,
    RequestedOutput,
    StepOutcome,
    StepTimes,
    Tensor,
    bytes_array,
)
from app.core.model import TensorSpec
from app.steps.plan import PENDING, SKIPPED, Plan, PlannedStep, Values, array_of

READ_AHEAD = 8
"""Responses that may wait for their reader."""


class StepSlot(Protocol):
    def leave(self, error: BaseException | None = None) -> None: ...


EnterStep = Callable[[PlannedStep, Deadline], Awaitable[StepSlot]]
"""Waits for a slot of a step's model. Raises TooManyRequests or DeadlineExceeded."""
Counted = Callable[[str, str, str], None]
"""Is called with the pipeline, the step, and ``ok``, ``skipped``, ``failed``, ``cancelled`` or ``exit``."""


class StepsEngine(Engine):
    """Only requests with a :class:`Plan` have steps; all others pass unchanged."""

    def __init__(self, engine: Engine, enter: EnterStep, counted: Counted = lambda *_: None) -> None:
        self.engine, self.enter, self.counted = engine, enter, counted

    def infer(self, request: InferenceRequest, deadline: Deadline) -> Coroutine[Any, Any, InferenceResponse]:
        plan = _plan_of(request)
        if plan is None:
            return self.engine.infer(request, deadline)
        return _Run(self, plan, request, deadline, _given(plan, request)).answer()

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        plan = _plan_of(request)
        if plan is None:
            return self.engine.infer_stream(request, deadline)
        return merged(_Run(self, plan, request, deadline, _given(plan, request)).stream, READ_AHEAD)


def _plan_of(request: InferenceRequest) -> Plan | None:
    return next((each for each in request.extensions if isinstance(each, Plan)), None)


def _given(plan: Plan, request: InferenceRequest) -> Values:
    parameters = {name: array_of(value) for name, value in request.parameters.items()}
    return plan.defaults | parameters | {tensor.name: tensor for tensor in request.inputs}


class _Run:
    """The steps of one request, or those behind one response of a decoupled step."""

    def __init__(
        self, engine: StepsEngine, plan: Plan, request: InferenceRequest, deadline: Deadline, values: Values
    ) -> None:
        """``values``: what is there at the start."""
        self._engine, self._plan, self._deadline = engine, plan, deadline
        self._kept: dict[str, KeptMemory] = {}
        """The memory of a step's outputs."""
        self._request = replace(request, inputs=(), extensions=())
        self._times = request.steps or StepTimes()
        self._waiting = [step for step in plan.steps if not step.streams]
        self._done: set[str] = set()
        self._values = values
        self._tasks: dict[asyncio.Task[Values], PlannedStep] = {}
        self._skipped: list[str] = []
        self._exit: str | None = None
        self._written: set[str] = set()
        """The outputs of a stream that were put."""
        self._streams: dict[str, bool] = {}
        """The decoupled steps that ended -> whether they had a response. Known before if they had one."""
        self._put: Put | None = None
        self._copies = False
        """Whether the values may lie in memory that is given back."""
        self._has_slot = False
        """Whether the calls run in the slot of a stream: a wait for another one could last for ever."""

    async def answer(self) -> InferenceResponse:
        """Raises the error of a step that is not optional."""
        try:
            await self._run()
            return InferenceResponse(self._outputs(), early_exit=self._exit)
        finally:
            self._release()

    async def stream(self, put: Put) -> None:
        """Puts the answer of each response of the decoupled steps, and at the end what is left."""
        self._put = put
        try:
            await self._run()
            response = InferenceResponse(self._outputs(), early_exit=self._exit)
        finally:
            self._release()
        await put(response)

    def _release(self) -> None:
        self._values.clear()  # the memory must have no references
        for kept in self._kept.values():
            kept.release()

    # Order

    async def _run(self) -> None:
        """Runs all steps, until the pipeline ends. Raises the first error."""
        self._settle_races()  # a tensor of the request may be the first
        try:
            while True:
                ready = self._ready()
                if self._exit is not None:
                    return
                if len(ready) == 1 and not self._tasks:  # a chain needs no tasks
                    self._take(ready[0], await self._called(ready[0]))
                    continue
                for step in ready:
                    self._tasks[asyncio.create_task(self._called(step))] = step
                if not self._tasks:
                    return
                ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    step = self._tasks.pop(task)
                    self._take(step, {} if task.cancelled() else task.result())
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()  # their errors refer to this object

    def _ready(self) -> list[PlannedStep]:
        """Takes the steps that can run now. Notes those that are skipped, and the end of the pipeline."""
        ready = list[PlannedStep]()
        is_new = True
        while is_new:
            is_new = False
            for step in tuple(self._waiting):
                verdict = step.verdict(self._values, self._done)
                if verdict == PENDING:
                    continue
                self._waiting.remove(step)
                if not verdict:
                    self._note(step, "skipped")
                    self._take(step, {})
                    is_new = True
                elif step.spec.exit is None:
                    ready.append(step)
                else:
                    self._note(step, "exit")
                    self._exit = step.spec.exit
                    return []
        return ready

    def _take(self, step: PlannedStep, outputs: Values) -> None:
        """Notes what a step wrote. What it did not write is missing for good."""
        self._done.add(step.name)
        for each in step.outputs:
            name = f"{step.name}.{each.name}"
            self._values[name] = outputs.get(each.name)
        if step.config is not None and step.config.decoupled and not self._streams.setdefault(step.name, False):
            silent = {name for name, has_response in self._streams.items() if not has_response}
            behind = [each for each in self._plan.steps if step.name in each.streams and each.streams <= silent]
            self._waiting += behind  # they may have other sources
        self._settle_races()
        for name, kept in self._kept.items():
            if kept.releases:
                self._copies = True
                if name in self._plan.read_by and self._plan.read_by[name] <= self._done:
                    kept.release()

    def _settle_races(self) -> None:
        for race in self._plan.races:
            winner = next((name for name in race.source.names if self._values.get(name) is not None), None)
            if winner is not None and race.source.text not in self._values:
                self._values[race.source.text] = self._values[winner]
                self._stop(race.rivals[winner])

    def _stop(self, steps: frozenset[str]) -> None:
        for step in [each for each in self._waiting if each.name in steps]:
            self._waiting.remove(step)
            self._take(step, {})
        for task, step in self._tasks.items():
            if step.name in steps:
                task.cancel()

    def _outputs(self) -> dict[str, Tensor]:
        """What the answer has that was not put before."""
        outputs = {}
        for name, source in self._plan.outputs.items():
            found = source.look(self._values)
            if isinstance(found, Tensor) and name not in self._written:
                array = found.array.copy() if self._copies else found.array
                outputs[name] = Tensor(name, found.datatype, array)
        if self._plan.reports_skipped and (self._put is None or self._skipped or outputs):
            names = [name.encode() for name in self._skipped]
            outputs[SKIPPED] = Tensor(SKIPPED, BYTES, bytes_array(names, (len(names),)))
        return outputs

    # Calls

    async def _called(self, step: PlannedStep) -> Values:
        """The outputs of a step. Raises GatewayError, unless the step is optional."""
        deadline, timeout_s, began = self._deadline, step.spec.timeout_s, perf_counter()
        outcome: StepOutcome = "cancelled"
        if timeout_s is not None:
            deadline = Deadline(min(deadline.expires_at, Deadline.after(timeout_s).expires_at))
        try:
            if step.config is not None and step.config.decoupled:
                outputs: Values = {}
                await self._relay(step, deadline)
            elif step.spec.each is not None:
                outputs = await _Items(self, step, deadline).run()
            else:
                outputs = self._written_by(step, await self.call(step, self.inputs_of(step), deadline))
            outcome = "ok"
            return outputs
        except GatewayError as exc:
            outcome = "failed"
            is_behind = exc.failed_step not in ("", step.name)  # a step that runs for each response of this one
            if not step.spec.optional or is_behind or self._deadline.has_passed:
                exc.failed_step = exc.failed_step or step.name
                raise
            exc.forget_frames()  # they hold the inputs
            self._skipped.append(step.name)
            return {}
        finally:
            self._note(step, outcome, perf_counter() - began)

    def _note(self, step: PlannedStep, outcome: StepOutcome, seconds: float = 0.0) -> None:
        self._engine.counted(self._plan.name, step.name, outcome)
        self._times.add(step.name, outcome, seconds)

    async def call(self, step: PlannedStep, inputs: Mapping[str, Array], deadline: Deadline) -> InferenceResponse:
        """One call of a step's model, in a slot of its own."""
        request = self._request_of(step, inputs)
        if self._has_slot:
            return await self._engine.engine.infer(request, deadline)
        slot = await self._engine.enter(step, deadline)
        try:
            response = await self._engine.engine.infer(request, deadline)
        except BaseException as exc:
            slot.leave(exc)
            raise
        slot.leave()
        return response

    def _request_of(self, step: PlannedStep, inputs: Mapping[str, Array]) -> InferenceRequest:
        assert step.config is not None
        specs = {each.tensor.name: each.tensor for each in step.inputs}
        self._times.calls += 1
        return replace(
            self._request,
            model=step.config.name,
            version=step.spec.version,
            inputs=tuple([Tensor(name, specs[name].datatype, array) for name, array in inputs.items()]),
            outputs=tuple([RequestedOutput(each.name) for each in step.outputs]),
            request_id=f"{self._request.request_id}.{step.name}.{self._times.calls}",
            idempotent=self._request.idempotent or step.spec.idempotent,
            takes_traceparent=step.takes_traceparent,
            ends_by_hook=False,
            extensions=(self._kept.setdefault(step.name, KeptMemory()),),
        )

    def found(self, step: PlannedStep) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
        """The inputs that are there: the model's tensor, its value and its source."""
        for each in step.inputs:
            found = each.source.look(self._values)
            if isinstance(found, Tensor):
                yield each.tensor.name, found, each.source.names

    def inputs_of(self, step: PlannedStep) -> dict[str, Array]:
        has_batch = step.config is not None and step.config.max_batch_size > 0
        return {name: each.array[None] if has_batch else each.array for name, each, _ in self.found(step)}

    def _written_by(self, step: PlannedStep, response: InferenceResponse) -> Values:
        assert step.config is not None
        rows = 1 if step.config.max_batch_size else None
        return {each.name: _item_of(each, response, rows, only=True) for each in step.outputs}

    # Streams

    async def _relay(self, step: PlannedStep, deadline: Deadline) -> None:
        """Reads a stream. For each response runs the steps behind it, and puts the answer."""
        assert self._put is not None
        anew = {name for names in self._plan.of_stream.values() for name in names}
        # The outputs that are the same for all responses are put once.
        lasting = {name for name, source in self._plan.outputs.items() if anew.isdisjoint(source.names)}
        request, slot = self._request_of(step, self.inputs_of(step)), await self._engine.enter(step, deadline)
        try:
            async with aclosing(self._engine.engine.infer_stream(request, deadline)) as responses:
                async for response in responses:
                    if not response.outputs:
                        continue
                    self._streams[step.name] = True
                    behind = self._behind(step, self._written_by(step, response))
                    try:
                        await behind._run()
                        outputs = behind._outputs()
                    finally:
                        behind._release()
                    self._written |= outputs.keys() & lasting
                    await self._put(replace(response, outputs=outputs, is_final=False))
                    if behind._exit is not None:
                        self._exit = behind._exit
                        break
        except BaseException as exc:
            slot.leave(exc)
            raise
        slot.leave()

    def _behind(self, step: PlannedStep, outputs: Values) -> "_Run":
        """The run of what is behind one response. What other streams write is not part of it."""
        others = {name for stream, names in self._plan.of_stream.items() if stream != step.name for name in names}
        own = {f"{step.name}.{name}": tensor for name, tensor in outputs.items()}
        values = self._values | dict.fromkeys(others) | own
        run = _Run(self._engine, self._plan, self._request, self._deadline, values)
        run._skipped, self._skipped, run._times = self._skipped, [], self._times
        run._waiting = [each for each in self._plan.steps if step.name in each.streams]
        run._done, run._written, run._has_slot = {*self._done, step.name}, self._written, True
        run._copies = self._copies
        return run


class _Items:
    """The calls of a step with ``each``: one for as many rows as the model takes, several beside each other."""

    def __init__(self, run: _Run, step: PlannedStep, deadline: Deadline) -> None:
        assert step.config is not None
        self._run, self._step, self._deadline = run, step, deadline
        self._size = step.config.max_batch_size
        self._rows, self._repeated = dict[str, Array](), dict[str, Array]()
        for name, tensor, names in run.found(step):
            (self._rows if step.spec.each in names else self._repeated)[name] = tensor.array
        self._count = len(next(iter(self._rows.values())))
        starts = range(0, self._count, self._size or 1)
        self._parts = [range(start, min(start + (self._size or 1), self._count)) for start in starts]
        self._outputs: list[Values] = [{} for _ in self._parts]

    async def run(self) -> Values:
        """The outputs of all rows, in their order. Raises the first error."""
        waiting = iter(enumerate(self._parts))

        async def work() -> None:
            for index, rows in waiting:
                self._outputs[index] = await self._called(rows)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._step.spec.in_flight, len(self._parts))):
                    group.create_task(work())
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        return {each.name: self._joined(each) for each in self._step.outputs}

    async def _called(self, rows: range) -> Values:
        if self._size:
            inputs = {name: array[rows.start : rows.stop] for name, array in self._rows.items()}
            inputs |= {name: np.broadcast_to(each, (len(rows), *each.shape)) for name, each in self._repeated.items()}
        else:
            inputs = {name: array[rows.start] for name, array in self._rows.items()} | self._repeated
        response = await self._run.call(self._step, inputs, self._deadline)
        count = len(rows) if self._size else None
        return {each.name: _item_of(each, response, count) for each in self._step.outputs}

    def _joined(self, spec: TensorSpec) -> Tensor | None:
        """Raises ContractViolation if only some rows have the output, or rows of several shapes."""
        found = [part[spec.name] for part in self._outputs]
        arrays = [each.array if self._size else each.array[None] for each in found if each is not None]
        if not found:
            shape = (0, *(max(dim, 0) for dim in spec.dims))
            return Tensor(spec.name, spec.datatype, np.empty(shape, DTYPE_BY_DATATYPE[spec.datatype]))
        if not arrays:
            return None
        if len(arrays) < len(found) or len({each.shape[1:] for each in arrays}) > 1:
            text = f"The rows of output '{spec.name}' of step '{self._step.name}' have several shapes, or are missing."
            raise ContractViolation(text, tensor=spec.name)
        return Tensor(spec.name, spec.datatype, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def _item_of(spec: TensorSpec, response: InferenceResponse, rows: int | None, *, only: bool = False) -> Tensor | None:
    """The output in its declared form. ``rows``: None for a model without batch dimension. ``only``: take the row.

    Raises ContractViolation if the model wrote another shape or type.
    """
    tensor = response.outputs.get(spec.name)
    if tensor is None:
        return None
    array, dims = tensor.array, spec.dims if rows is None else (rows, *spec.dims)
    if spec.is_typed:
        shape = declared_shape(array.shape, dims)
        typed = array if tensor.datatype == spec.datatype else as_datatype(array, spec.datatype)
        if shape is None or typed is None:
            text = f"Output '{spec.name}' is {tensor.datatype} {shape_text(array.shape)}; {spec.datatype} "
            raise ContractViolation(f"{text}{shape_text(dims)} is declared.", tensor=spec.name)
        array = typed if typed.shape == shape else typed.reshape(shape)
    return Tensor(
        spec.name, tensor.datatype if not spec.is_typed else spec.datatype, array[0] if only and rows else array
    )
