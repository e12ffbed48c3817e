"""Runs one unary request of a pipeline, and converts the responses of any request to the caller's values.

A ``Collector`` gets the responses of a stream, a ``WholeAnswer`` those of a unary request. With ``batch`` the items run
as parts, each with such an answer, and the answers are joined in order.
``Canceller`` cancels abandoned requests, and ``run_sample`` runs a pipeline's sample.
"""

import asyncio
import codecs
import functools
import logging
import math
import operator
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from app.core.aio import BackgroundTasks
from app.core.answer import (
    Answer,
    Batch,
    BatchPart,
    Ending,
    Tokens,
    Values,
    check_rows,
    items_of,
    joined_rows,
    part_of,
)
from app.core.engine import Engine, discard_stream
from app.core.errors import ContractViolation, GatewayError
from app.core.inference import BYTES, Deadline, InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.pipelines.examples import body_of, trial_requests
from app.pipelines.openai_mapping import Division
from app.pipelines.outputs import ContractCheck, OutputField, TextDifferences
from app.pipelines.pipeline import CountLimits, Pipeline, Target
from app.pipelines.spec import INDEX

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Collector(Answer):
    """The answer of a stream: the values of each response. Determines how the answer ended."""

    has_enough = False
    tokens: Tokens | None = None
    _item_count = 1
    _fault: ContractViolation | None = None
    """Of a model that is not decoupled: an output is missing, or has no elements although its declared shape has some.
    An early exit may explain it."""

    def __init__(self, pipeline: Pipeline, request: InferenceRequest, *, is_divided: bool = True) -> None:
        """``is_divided``: the reasoning in the text is an output of its own, if the pipeline has one."""
        self._pipeline = pipeline
        self._request_id = request.request_id
        if pipeline.batch is not None:
            self._item_count = items_of(request)
        self._fields = pipeline.outputs
        self._decoupled = pipeline.config.decoupled
        self._contract = None
        if contracts := pipeline.spec.contract:
            self._contract = ContractCheck(contracts, request.parameters, takes_batch=pipeline.contracts_take_batch)
        self._texts: dict[str, TextDifferences | codecs.IncrementalDecoder] = {
            field.name: TextDifferences(field.tensor.name) if field.spec.accumulates else _UTF8("replace")
            for field in pipeline.text_runs
        }
        self._counts = dict.fromkeys(pipeline.counts, 0)
        self._limits: Mapping[str, float] = {}
        for each in request.extensions:
            if isinstance(each, CountLimits):
                self._limits = each.by_output
        self._written: set[str] = set()
        self._filled: set[str] = set()
        if pipeline.usage is not None:
            self.tokens = Tokens()
        self._division = None if pipeline.divided is None or not is_divided else Division(pipeline.divided, request)

    def count(self, response: InferenceResponse) -> None:
        """Counts the tokens of a response, in the tensors that ``openai: usage`` names."""
        usage, tokens = self._pipeline.usage, self.tokens
        if usage is None or tokens is None:
            return
        prompt = response.outputs.get(usage.prompt_tokens)
        if prompt is not None and prompt.array.size:
            tokens.prompt = int(prompt.array.sum())
        written = response.outputs.get(usage.completion_tokens or "")
        if written is None or not written.array.size:
            return
        if usage.completion_count == "elements":
            tokens.completion += written.array.size
        elif usage.completion_count == "sum":
            tokens.completion += int(written.array.sum())
        else:
            tokens.completion = int(written.array.flat[-1])

    def add(self, response: InferenceResponse) -> Values | None:
        """Returns the values of one response; None for a response without outputs.

        Raises ContractViolation, also if a model that is not decoupled omitted an output, or wrote it without its
        elements, and no rule of an early exit holds.
        """
        if not response.outputs:
            return None
        if self.tokens is not None:
            self.count(response)
        if self._contract is not None:
            self._contract.check(response)
        self._written.update(response.outputs)
        if self._pipeline.rules.rules:
            self._filled.update(name for name, tensor in response.outputs.items() if tensor.array.size)
        values = self._values_of(response)
        if self._fault is not None and self._reason_of_outputs() is None:
            raise self._fault
        if self._division is not None:
            values = self._division.divided(values)
        if response.is_final and (self._texts or self._counts):
            for name, rest in self._rests().items():
                values[name] = (values[name] or "") + rest
        return values

    def _values_of(self, response: InferenceResponse) -> Values:
        values = dict(self._pipeline.empty_values)
        for field in self._fields:
            tensor = response.outputs.get(field.tensor.name)
            if field.is_reasoning:
                continue
            if tensor is None:
                if not self._decoupled:
                    self._fault = self._fault or _not_written(field.tensor.name)
                continue
            array = field.array_of(tensor, self._item_count)
            if not array.size:
                if not self._decoupled and not field.may_be_empty:
                    self._fault = self._fault or field.other_shape(tensor.shape)
            elif field.is_count:
                self._counts[field.name] += int(array.sum())
            else:
                text = self._texts.get(field.name)
                values[field.name] = field.value_of(array) if text is None else text.decode(array.flat[0])
        return values

    def finish(self, error: GatewayError | None = None) -> Ending:
        """An early exit before any output has the empty result.

        Raises the error for the caller, or ContractViolation if a model that is not decoupled wrote no output.
        """
        rests = None
        if error is not None:
            reason: str | None = self._pipeline.early_exit_of(error, self._request_id)
        else:
            reason = self._reason_of_outputs()
            if reason is None and not self._written and not self._decoupled:
                raise _not_written(self._fields[0].tensor.name)
            if self._texts or self._counts:
                rests = self._rests()
        if rests or (reason is not None and not self._written):
            return Ending(reason, [{**self._pipeline.empty_values, **(rests or {})}])
        return Ending(reason)

    def _reason_of_outputs(self) -> str | None:
        rules = self._pipeline.rules
        return rules.reason_of_outputs(self._written, self._written - self._filled) if rules.rules else None

    def _rests(self) -> Mapping[str, str]:
        """Returns, once, U+FFFD for each remaining byte of an incomplete character, and whether limits were reached."""
        rests: dict[str, str] = {name: decoder.decode(b"", final=True) for name, decoder in self._texts.items()}
        for name, count in self._counts.items():
            rests[name] = "length" if count >= self._limits.get(name, math.inf) else "stop"
        self._counts = {}
        if self._division is not None:
            return self._division.rests(rests)
        return {name: rest for name, rest in rests.items() if rest}


class WholeAnswer(Collector):
    """The answer of a unary request: one output, with each output of a decoupled model joined as it declares."""

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        super().__init__(pipeline, request)
        self._values: Values = {}
        """Of a model that is not decoupled."""
        self._pieces: dict[str, list[Any]] = {field.name: [] for field in self._fields} if self._decoupled else {}
        """By output, the values that are not None; only the last one if they are not joined."""

    def add(self, response: InferenceResponse) -> None:
        """Raises the errors of :meth:`Collector.add`."""
        values = super().add(response)
        if values is not None and self._decoupled:
            self._take(values)
        elif values is not None:
            self._values = values

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`Collector.finish`."""
        ending = super().finish(error)
        if not self._decoupled:
            return Ending(ending.early_exit, ending.outputs or (self._values,))
        for rest in ending.outputs:
            self._take(rest)
        return Ending(ending.early_exit, ({field.name: self._joined(field) for field in self._fields},))

    def _take(self, values: Values) -> None:
        for field in self._fields:
            if (value := values[field.name]) is not None:
                pieces = self._pieces[field.name]
                if field.join == "last" or field.is_count:
                    pieces.clear()
                pieces.append(value)

    def _joined(self, field: OutputField) -> Any:
        """Joins the texts or arrays of all responses. Arrays of different shapes become the list of their items."""
        pieces = self._pieces[field.name]
        if field.join in ("last", "sum") or field.is_count:
            return functools.reduce(operator.add, pieces) if pieces else field.empty_value
        if field.is_text_run:
            return "".join(pieces)
        has_lists = not field.is_bare or field.join == "concatenate"
        items = [item for each in pieces for item in (each if has_lists and isinstance(each, list) else [each])]
        return joined_rows(items) if items and isinstance(items[0], np.ndarray) else items


def _not_written(tensor: str) -> ContractViolation:
    hint = "If the model may omit it, declare an early_exit rule with missing: [...] in gateway.yaml."
    return ContractViolation(f"Output '{tensor}' was not written.", tensor=tensor, hint=hint)


class StreamedBatch(Batch):
    """The outputs of a stream with ``batch``.

    Each output has the number of its item as ``index``; if the model takes several items at a time, that of the first
    item of the part. An early exit of a part is that of each of its items.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        super().__init__(request, pipeline.call_items)
        self._pipeline = pipeline
        self._exits: list[str | None] = [None] * self.count

    def answer_of(self, part: BatchPart) -> Answer:
        return Collector(self._pipeline, part.request)

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Batch.add`."""
        values = super().add(response)
        return None if values is None else {INDEX: response.choice, **values}

    def put(self, items: range, answer: Answer, ending: Ending) -> Values | None:
        self._exits[items.start : items.stop] = [ending.early_exit] * len(items)
        return next(iter(ending.outputs), None)

    def finish(self, error: GatewayError | None = None) -> Ending:
        """The whole request is an early exit if each of its items is. Raises the error."""
        super().finish(error)
        exits = self._exits
        return Ending(None if None in exits else exits[0], (), exits) if self._pipeline.rules else Ending()


class PipelineBatch(StreamedBatch):
    """The answer of a unary request.

    A decoupled model gets one item at a time, because Triton does not tell to which row a response belongs.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        super().__init__(pipeline, request)
        self._rows: dict[str, dict[int, Any]] = {field.name: {} for field in pipeline.outputs}
        """By output, the rows of each part, by its first item."""
        self._sizes: dict[int, dict[str, int]] = {}
        """By first item of a part and tensor, the size of the first dimension."""

    def answer_of(self, part: BatchPart) -> Answer:
        return WholeAnswer(self._pipeline, part.request)

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Batch.add`."""
        if response.outputs:
            sizes = {name: tensor.shape[0] if tensor.shape else 0 for name, tensor in response.outputs.items()}
            self._sizes[response.choice] = sizes
        return super().add(response)

    def put(self, items: range, answer: Answer, ending: Ending) -> None:
        """Raises ContractViolation for rows that are not the items."""
        sizes = self._sizes.pop(items.start, {})
        (values,) = ending.outputs  # of a model that is not decoupled, each is a list or an array of rows
        for field in self._pipeline.outputs:
            value, has_exit = values[field.name], ending.early_exit is not None
            if self._pipeline.config.decoupled:
                value = [value]
            elif len(value) == 0 and (has_exit or self.has_several):
                if not has_exit:
                    check_rows(field.tensor.name, sizes.get(field.tensor.name, 0), items)
                value = [field.empty_item] * len(items)
            elif self.has_several:
                check_rows(field.tensor.name, len(value), items)
            self._rows[field.name][items.start] = value
        super().put(items, answer, ending)

    def finish(self, error: GatewayError | None = None) -> Ending:
        ending = super().finish(error)
        joined = {name: joined_rows([rows for _, rows in sorted(parts.items())]) for name, parts in self._rows.items()}
        return Ending(ending.early_exit, [joined], self._exits)


def answer_of(pipeline: Pipeline, request: InferenceRequest) -> Answer:
    """The answer of a unary request."""
    return WholeAnswer(pipeline, request) if pipeline.batch is None else PipelineBatch(pipeline, request)


def streamed_answer_of(pipeline: Pipeline, request: InferenceRequest) -> Answer:
    """The answer of a stream."""
    return Collector(pipeline, request) if pipeline.batch is None else StreamedBatch(pipeline, request)


async def run(
    answer: Answer,
    responses: Awaitable[InferenceResponse] | AsyncGenerator[InferenceResponse],
    responded: Callable[[], None] | None = None,
) -> Ending:
    """Runs one unary answer. Raises GatewayError; cancelling the task cancels the work in Triton.

    ``responded``: is called for each of several responses.
    """
    try:
        if isinstance(responses, Awaitable):
            answer.add(await responses)
        else:
            async with aclosing(responses):
                async for response in responses:
                    if responded is not None:
                        responded()
                    answer.add(response)
                    if answer.has_enough:
                        break
        return await answer.end()
    except GatewayError as exc:
        return await answer.end(exc)


CANCEL_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Canceller:
    """Calls a pipeline's ``cancel`` model with the id of an abandoned request.

    The model cancels a step of an ensemble, because Triton does not pass a cancellation on to the steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls = BackgroundTasks()

    def cancel(self, target: Target, request: InferenceRequest) -> None:
        """Starts the call and returns at once. A no-op for a pipeline without ``cancel``."""
        hook = target.spec.cancel
        if hook is not None:
            tensor = Tensor(hook.input, BYTES, bytes_array([request.request_id.encode()], (1,)))
            self._calls.start(self._call(InferenceRequest(hook.model, (tensor,), about=request.request_id)))

    async def close(self) -> None:
        """Waits for the running calls."""
        await self._calls.close()

    async def _call(self, request: InferenceRequest) -> None:
        try:
            await discard_stream(self._engine, request, Deadline.after(CANCEL_TIMEOUT_S))
        except GatewayError as exc:
            _log.warning("cancel call to model '%s' failed: %s", request.model, exc.detail)


async def run_sample(engine: Engine, pipeline: Pipeline, folder: Path) -> None:
    """Runs a pipeline's sample before the pipeline counts as ready: no caller waits for a model's first-time work.

    With ``batch``, only its first part. Then runs the trials of the pipeline's layers.

    ``folder``: what the paths of files are relative to. Raises GatewayError, OSError, TypeError or ValueError.
    """
    body = await asyncio.to_thread(body_of, pipeline, pipeline.spec.sample or {}, folder)
    request = replace(pipeline.probe_of(body), is_probe=True)
    if pipeline.batch is not None:
        request = part_of(request, range(pipeline.call_items))
    stream, timeout_s = pipeline.spec.stream, pipeline.timeout_s
    if stream is not None:  # its first output may wait behind the requests of callers
        timeout_s = max(timeout_s, stream.first_output_s or 0.0)
    call = engine.infer_stream if pipeline.config.decoupled else engine.infer
    await run(WholeAnswer(pipeline, request), call(request, Deadline.after(timeout_s)))
    for layer in pipeline.layers:
        declared, varied = await asyncio.to_thread(trial_requests, pipeline, folder)
        await layer.run_trial(engine, declared, varied, timeout_s)
