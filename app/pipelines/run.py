"""Runs one unary request of a pipeline, and converts the responses of any request to the caller's values.

A ``Collector`` gets the responses of one request. With ``batch`` the items run as parts, each with a collector, and
their answers are joined in order.
"""

import codecs
import functools
import math
import operator
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from app.codecs.kinds import declared_shape, shape_text
from app.core import errors
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
)
from app.core.inference import InferenceRequest, InferenceResponse, Tensor
from app.pipelines.fields import OutputField, TextDifferences
from app.pipelines.model_errors import EARLY_EXIT, explain, name_failed_step, named_model, public_text
from app.pipelines.openai_mapping import Division
from app.pipelines.pipeline import CountLimits, Pipeline
from app.pipelines.spec import INDEX

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Collector(Answer):
    """The values of a request's responses. Determines how the answer ended.

    The answer of a stream writes those of each response. A whole answer writes one output at the end, with each output
    of a decoupled model joined as it declares.
    """

    has_enough = False
    tokens: Tokens | None = None
    _fault: errors.ContractViolation | None = None
    """Only for a model that is not decoupled: an output is missing, or is empty although its declared shape is not.
    An early exit may explain it."""
    _exit: str | None = None
    """The reason of an early exit by the engine."""

    def __init__(
        self, pipeline: Pipeline, request: InferenceRequest, *, is_whole: bool = False, is_divided: bool = True
    ) -> None:
        """``is_divided``: the reasoning in the text is an output of its own, if the pipeline has one."""
        self._pipeline = pipeline
        self._request_id = request.request_id
        self._is_whole = is_whole
        self._item_count = 1 if pipeline.batch is None else items_of(request)
        self._decoupled = pipeline.config.decoupled
        self._contracts, self._parameters = pipeline.spec.contract, request.parameters
        self._first_sizes: dict[str, int] = {}
        """By tensor of a contract, the number of elements in its first response."""
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
        self._values: Values = {}
        """The whole answer of a model that is not decoupled."""
        self._pieces: dict[str, list[Any]] = {}
        """The whole answer of a decoupled model: by output, the values that are not None; if they are not joined, only
        the last one."""

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
        """Returns the values of one response of a stream; None for a response without outputs, or of a whole answer.

        Raises ContractViolation, also if a model that is not decoupled omitted an output, or wrote it without its
        elements, and no rule of an early exit holds.
        """
        self._exit = self._exit or response.early_exit
        if not response.outputs:
            return None
        if self.tokens is not None:
            self.count(response)
        if self._contracts:
            self._check_contracts(response)
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
        if not self._is_whole:
            return values
        if self._decoupled:
            self._take(values, response.outputs)
        else:
            self._values = values
        return None

    def _values_of(self, response: InferenceResponse) -> Values:
        values = dict(self._pipeline.empty_values)
        for field in self._pipeline.outputs:
            tensor = response.outputs.get(field.tensor.name)
            if field.is_reasoning:
                continue
            if tensor is None:
                if not self._decoupled and not field.tensor.optional:
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

    def finish(self, error: errors.GatewayError | None = None) -> Ending:
        """An early exit before any output has the empty result.

        Raises the error for the caller, or ContractViolation if a model that is not decoupled wrote no output.
        """
        pipeline, rests = self._pipeline, None
        if error is not None:
            reason: str | None = early_exit_of(pipeline, error, self._request_id)
        else:
            reason = self._reason_of_outputs() if pipeline.may_exit else None
            needed = next((each for each in pipeline.outputs if not each.tensor.optional), None)
            if reason is None and needed is not None and not self._written and not self._decoupled:
                raise _not_written(needed.tensor.name)
            if self._texts or self._counts:
                rests = self._rests()
        outputs: Sequence[Values] = ()
        if rests or (not self._written and (reason is not None or not self._decoupled)):
            outputs = [{**pipeline.empty_values, **(rests or {})}]
        if self._is_whole and self._decoupled:
            for values in outputs:
                self._take(values, {})
            outputs = [{field.name: self._joined(field) for field in pipeline.outputs}]
        elif self._is_whole:
            outputs = outputs or (self._values,)
        return Ending(reason, outputs)

    def _reason_of_outputs(self) -> str | None:
        return self._exit or self._pipeline.rules.reason_of_outputs(self._written, self._written - self._filled)

    def _rests(self) -> Mapping[str, str]:
        """Returns, once, U+FFFD for each remaining byte of an incomplete character, and whether limits were reached."""
        rests: dict[str, str] = {name: decoder.decode(b"", final=True) for name, decoder in self._texts.items()}
        for name, count in self._counts.items():
            rests[name] = "length" if count >= self._limits.get(name, math.inf) else "stop"
        self._counts = {}
        if self._division is not None:
            return self._division.rests(rests)
        return {name: rest for name, rest in rests.items() if rest}

    def _check_contracts(self, response: InferenceResponse) -> None:
        """Raises ContractViolation.

        A common fault of language-model ensembles is a step that sends all tokens so far instead of the newest token.
        Its tensor grows with each response, and Triton accepts this if the next step accepts any size.
        """
        takes_batch = self._pipeline.contracts_take_batch
        for name, contract in self._contracts.items():
            tensor = response.outputs.get(name)
            if tensor is None:
                continue
            size, most, wrong, is_growth = tensor.array.size, contract.max_items, "", True
            limit = self._parameters.get(most) if isinstance(most, str) else most
            first = self._first_sizes.setdefault(name, size) if contract.not_growing else size
            agreed = (*((1,) if takes_batch else ()), *(contract.shape or ()))
            if limit is not None and size > int(limit):
                wrong = f"the contract allows at most {limit} items"
            elif contract.shape is not None and declared_shape(tensor.shape, agreed) is None:
                words = " with the batch dimension" if takes_batch else ""
                wrong, is_growth = f"the contract requires {shape_text(agreed)}{words}", False
            elif size > first:
                wrong = f"the first response had {first} items, and no later response may have more"
            if wrong:
                grows = f"A step sends all items of '{name}' with each response. It must send only items that are new."
                raise errors.ContractViolation(
                    f"Output '{name}' has shape {shape_text(tensor.shape)}; {wrong}.",
                    tensor=name,
                    hint=grows if is_growth else None,
                )

    def _take(self, values: Values, written: Mapping[str, Tensor]) -> None:
        here = [names for names in self._pipeline.config.together if not names.isdisjoint(written)]
        for field in self._pipeline.outputs:
            has_place = field.join == "list" and any(field.tensor.name in names for names in here)
            if (value := values[field.name]) is not None or has_place:
                pieces = self._pieces.setdefault(field.name, [])
                if field.join == "last" or field.is_count:
                    pieces.clear()
                pieces.append(value)

    def _joined(self, field: OutputField) -> Any:
        """Joins the texts or arrays of all responses. Arrays of different shapes become the list of their items."""
        pieces = self._pieces.get(field.name, [])
        if field.join in ("last", "sum") or field.is_count:
            return functools.reduce(operator.add, pieces) if pieces else field.empty_value
        if field.is_text_run:
            return "".join(pieces)
        has_lists = not field.is_bare or field.join == "concatenate"
        items = [item for each in pieces for item in (each if has_lists and isinstance(each, list) else [each])]
        if all(item is None for item in items):  # no response has the output
            return []
        return joined_rows(items) if isinstance(items[0], np.ndarray) else items


def _not_written(tensor: str) -> errors.ContractViolation:
    hint = "If the model may omit it, declare an early_exit rule with missing: [...] in gateway.yaml."
    return errors.ContractViolation(f"Output '{tensor}' was not written.", tensor=tensor, hint=hint)


class PipelineBatch(Batch):
    """The answer of a request with ``batch``.

    Each output of a stream has the number of its item as ``index``; if the model takes several items at a time, that of
    the first item of the part. An early exit of a part is that of each of its items. A decoupled model gets one item at
    a time, because Triton does not tell to which row a response belongs.
    """

    def __init__(self, pipeline: Pipeline, request: InferenceRequest, *, is_whole: bool) -> None:
        super().__init__(request, pipeline.call_items)
        self._pipeline, self._is_whole = pipeline, is_whole
        self._exits: list[str | None] = [None] * self.count
        self._rows: dict[str, dict[int, Any]] = {field.name: {} for field in pipeline.outputs}
        """For a whole answer: output -> first item of a part -> the part's rows."""
        self._sizes: dict[int, dict[str, int]] = {}
        """For a whole answer: first item of a part -> tensor -> the size of the first dimension."""

    def answer_of(self, part: BatchPart) -> Answer:
        return Collector(self._pipeline, part.request, is_whole=self._is_whole)

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Batch.add`."""
        if self._is_whole and response.outputs:
            sizes = {name: tensor.shape[0] if tensor.shape else 0 for name, tensor in response.outputs.items()}
            self._sizes[response.choice] = sizes
        values = super().add(response)
        return None if values is None else {INDEX: response.choice, **values}

    def put(self, items: range, answer: Answer, ending: Ending) -> Values | None:
        """Raises ContractViolation if the rows of a whole answer are not the items."""
        self._exits[items.start : items.stop] = [ending.early_exit] * len(items)
        if not self._is_whole:
            return next(iter(ending.outputs), None)
        sizes, has_exit = self._sizes.pop(items.start, {}), ending.early_exit is not None
        (values,) = ending.outputs  # of a model that is not decoupled, each is a list or an array of rows
        for field in self._pipeline.outputs:
            value = values[field.name]
            if self._pipeline.config.decoupled:
                value = [value]
            elif len(value) == 0 and (has_exit or len(self) > 1):
                if not has_exit:
                    check_rows(field.tensor.name, sizes.get(field.tensor.name, 0), items)
                value = [field.empty_item] * len(items)
            elif len(self) > 1:
                check_rows(field.tensor.name, len(value), items)
            self._rows[field.name][items.start] = value
        return None

    def finish(self, error: errors.GatewayError | None = None) -> Ending:
        """The whole request is an early exit if each of its items is. Raises the error."""
        super().finish(error)
        reason = None if None in self._exits else self._exits[0]
        if not self._is_whole:
            return Ending(reason, (), self._exits) if self._pipeline.may_exit else Ending()
        joined = {name: joined_rows([rows for _, rows in sorted(parts.items())]) for name, parts in self._rows.items()}
        return Ending(reason, [joined], self._exits)


def answer_of(pipeline: Pipeline, request: InferenceRequest, *, is_whole: bool) -> Answer:
    """The answer of a unary request, or of a stream."""
    if pipeline.batch is None:
        return Collector(pipeline, request, is_whole=is_whole)
    return PipelineBatch(pipeline, request, is_whole=is_whole)


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
        return answer.finish() if answer.end is None else await answer.end(None)
    except errors.GatewayError as exc:
        return answer.finish(exc) if answer.end is None else await answer.end(exc)


LONGEST_MESSAGE = 4096
"""Only this much of a message is searched."""
_HINT = "The gateway's log has the model's message in the line with this request id."
_REFUSALS: dict[str, tuple[type[errors.ClientError], str, str]] = {
    "context_length_exceeded": (
        errors.ContextLengthExceeded,
        "The request is longer than the model's context.",
        "is longer than the model's context",
    ),
    "invalid_input": (errors.InvalidInput, "The model refused the input.", "is not accepted by the model"),
}
"""By the code of a rule: the caller's error, its detail, and the problem of the rule's field."""


def early_exit_of(pipeline: Pipeline, error: errors.GatewayError, request_id: str) -> str:
    """The reason of the early exit that the pipeline's rules see in an error. Raises the caller's error if none.

    A step of ``rejects_input`` names itself at the start of its message (``<model>: <text>``); the pipeline's own
    model need not.
    """
    upstream, own_step = error.upstream, error.failed_step if pipeline.spec.steps else ""
    if upstream is not None:
        reason = pipeline.rules.reason_of_error(upstream, request_id)
        if reason is not None:
            return reason
        message = pipeline.rules.bare(upstream.message, request_id)
        if error.fault is not None:
            explain(error, pipeline.graph)
        elif error.code == "model_error" and error.hint is None:
            name_failed_step(error, message, pipeline.graph)
            if EARLY_EXIT.match(message):
                error.hint = f"If this is an early exit, declare it under `early_exit` in gateway.yaml. {error.hint}"
    if own_step and not error.detail.startswith(named := f"Step '{own_step}': "):
        error.failed_step, error.detail = own_step, named + error.detail
    if upstream is None:
        raise error
    same = (rule.reason for rule in pipeline.rules.rules if rule.error is not None and rule.error.message == message)
    if intended := next(same, None):
        error.hint = (
            f"The message matches the early exit '{intended}', but the code does not. A BLS script loses the code "
            "of the models it calls and must set the code again in its TritonError. For streams of a decoupled "
            "model, use code: any."
        )
    refusal = _refusal_of(pipeline, error, upstream, message) if error.code == "model_error" else None
    if refusal is not None:
        refusal.upstream, refusal.failed_step = upstream, error.failed_step
    shown = refusal or error
    if pipeline.exposes_errors:
        shown.detail += f" The model's message: {public_text(message)}"
    raise shown from error


def _refusal_of(
    pipeline: Pipeline, error: errors.GatewayError, upstream: errors.UpstreamError, message: str
) -> errors.GatewayError | None:
    """The error for a caller who can correct the request, without the model's message.

    ``message``: without Triton's prefixes.
    """
    for rule in pipeline.spec.refusals:
        if re.search(rule.message_pattern, message[:LONGEST_MESSAGE]):
            kind, detail, problem = _REFUSALS[rule.code]
            problems = [] if rule.field is None else [errors.FieldProblem(rule.field, problem)]
            return kind(rule.detail or detail, hint=_HINT, errors=problems)
    steps = pipeline.spec.rejects_input if upstream.grpc_code in ("INVALID_ARGUMENT", None) else ()
    own_step = (pipeline.spec.steps or {}).get(error.failed_step)
    called = (own_step and own_step.model) or pipeline.spec.model
    is_own = upstream.grpc_code is not None and called in steps
    if not is_own and not any(message.startswith(f"{step}: ") for step in steps):
        return None
    step = called if own_step else error.failed_step or called
    read = {
        edge.source.tensor.name
        for edge in pipeline.graph.edges
        if edge.source.step is None and edge.target.step is not None
        if (edge.target.step.part_of == error.failed_step if own_step else edge.target.step.model == step)
    }
    fields = [f"'{field.name}'" for field in pipeline.inputs if field.tensor.name in read]
    reads = f" It reads {' and '.join(fields)}." if fields else ""
    return errors.InvalidInput(f"{named_model(step, pipeline.graph)} refused the input.{reads}", hint=_HINT)
