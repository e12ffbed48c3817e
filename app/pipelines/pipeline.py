"""A pipeline: one product endpoint over one Triton model, compiled once for the model's signature.

The values of a request, by field name -> the request to the model. Compiled for one pipeline.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import orjson

from app.core.engine_layer import PipelineLayer
from app.core.errors import (
    ClientError,
    ContextLengthExceeded,
    FieldProblem,
    GatewayError,
    InvalidInput,
    InvalidRequest,
    UpstreamError,
)
from app.core.inference import Deadline, InferenceRequest, Tensor
from app.core.model import Capacity, ModelConfig
from app.core.sequence import SequenceIds
from app.pipelines.body import Body, BodyReader, Part
from app.pipelines.early_exit import EarlyExitRules
from app.pipelines.error_hints import explain, name_failed_step, named_model, public_text
from app.pipelines.graph import Graph
from app.pipelines.inputs import InputField
from app.pipelines.openai_mapping import OpenAIMapping, ReasoningOutput
from app.pipelines.openai_spec import UsageSpec
from app.pipelines.outputs import OutputField
from app.pipelines.parameters import ParameterField, json_objects
from app.pipelines.sessions import SessionTerms
from app.pipelines.spec import ADAPTER, STREAM_DEFAULTS, BatchSpec, PipelineSpec, RefusalRule, StreamSpec

_Problems = list[FieldProblem]


class RequestBuilder:
    """``parameters``: all, with those that callers cannot set. ``has_batch``: whether the model has batches."""

    def __init__(
        self,
        spec: PipelineSpec,
        inputs: Sequence[InputField],
        parameters: Sequence[ParameterField],
        *,
        has_batch: bool,
        takes_traceparent: bool = False,
    ) -> None:
        self._spec = spec
        self._takes_traceparent = takes_traceparent
        self._max_items = None if spec.batch is None else spec.batch.max_items
        self._inputs = tuple(inputs)
        self._parameters = {field.name: field for field in parameters}
        self._tensor_parameters = tuple(field for field in parameters if field.tensor is not None)
        self._json_objects = json_objects(parameters, has_batch=has_batch)
        self._request_parameters = tuple(field for field in parameters if field.is_request_parameter)

    def request_of(self, values: Mapping[str, Any]) -> InferenceRequest:
        """A request whose types, shapes and data agree. Raises InvalidInput."""
        problems: _Problems = []
        spec = self._spec
        if spec.adapters and ADAPTER in values:
            values = {**values, **spec.adapters[values[ADAPTER]]}
        tensors = self._input_tensors(values, problems)
        batch_size = 1 if self._max_items is None else _batch_size(tensors, self._max_items, problems)
        if self._tensor_parameters:
            read = _each(self._tensor_parameters, values, problems, lambda field, value: field.read(value, batch_size))
            tensors += read.values()
        for each in self._json_objects:
            tensors.append(each.read(_each(each.fields, values, problems, ParameterField.checked), batch_size))
        sent = self._request_parameters
        parameters = _each(sent, values, problems, ParameterField.checked) if sent else {}
        if problems:
            raise InvalidInput(f"'{problems[0].field}' {problems[0].problem}.", errors=problems)
        return InferenceRequest(
            model=spec.model,
            version=spec.version,
            inputs=tuple(tensors),
            parameters=parameters,
            ends_by_hook=spec.cancel is not None,
            idempotent=spec.idempotent,
            takes_traceparent=self._takes_traceparent,
        )

    def number_of(self, parameter: str, request: InferenceRequest) -> float | None:
        """Returns the value that a request has for a parameter that is a number."""
        field = self._parameters[parameter]
        if field.is_request_parameter:
            value = request.parameters.get(parameter)
        else:
            sent = {tensor.name: tensor.array for tensor in request.inputs}
            value = field.value_in(sent)
        return None if value is None else float(value)

    def _input_tensors(self, values: Mapping[str, Any], problems: _Problems) -> list[Tensor]:
        tensors: list[Tensor] = []
        for field in self._inputs:
            value = values.get(field.name)
            try:
                is_absent = value is None and not (field.is_null_a_value and field.name in values)
                tensor = field.default if is_absent else field.read(value)
            except ValueError as exc:
                problems.append(FieldProblem(field.name, str(exc)))
                continue
            if tensor is not None:
                tensors.append(tensor)
        return tensors


def _each(
    fields: Iterable[ParameterField],
    values: Mapping[str, Any],
    problems: _Problems,
    read: Callable[[ParameterField, Any], Any],
) -> dict[str, Any]:
    """What is read of each value that is sent, by field name."""
    found: dict[str, Any] = {}
    for field in fields:
        value = values.get(field.name, field.spec.default) if field.spec.send is None else field.spec.send
        if value is not None:
            try:
                found[field.name] = read(field, value)
            except ValueError as exc:
                problems.append(FieldProblem(field.name, str(exc)))
    return found


def _batch_size(tensors: Sequence[Tensor], most: int, problems: _Problems) -> int:
    """How many items the caller sent, the same of every input."""
    sizes = {tensor.shape[0] for tensor in tensors} or {1}
    size = sizes.pop()
    if sizes:
        problems.append(FieldProblem("batch", "has inputs with different numbers of items"))
    elif not 1 <= size <= most:
        problems.append(FieldProblem("batch", f"has {size} items; expected 1 to {most}"))
    return size


@dataclass(frozen=True, eq=False, kw_only=True)
class Target:
    """What a call runs: a pipeline, or a model by its own name, which is a pipeline without fields."""

    name: str
    """In metrics and spans."""
    spec: PipelineSpec
    config: ModelConfig
    capacity: Capacity = dataclasses.field(default_factory=Capacity)
    layers: tuple[PipelineLayer, ...] = ()
    """The layers around the engine that its requests use."""

    @property
    def stream_terms(self) -> StreamSpec:
        """The limits of a stream, also for one that is not declared."""
        return self.spec.stream or STREAM_DEFAULTS

    def prepared(self, request: InferenceRequest, deadline: Deadline) -> InferenceRequest:
        """The request as it is sent."""
        name = self.spec.deadline_parameter
        if name is not None:  # Triton tells no step the deadline
            expires_at_ms = round((time.time() + deadline.remaining_s()) * 1000)
            request = request.with_parameter(name, expires_at_ms)
        for layer in self.layers:
            request = layer.extended(request)
        return request


@dataclass(frozen=True, eq=False, kw_only=True)
class Pipeline(Target):
    graph: Graph
    inputs: tuple[InputField, ...]
    parameters: tuple[ParameterField, ...]
    outputs: tuple[OutputField, ...]
    text_runs: Sequence[OutputField]
    """The outputs that are pieces of a text, each with its own decoder. Reasoning is a part of such a text."""
    counts: Sequence[str]
    """The outputs that count what the responses have."""
    contracts_take_batch: bool
    """Whether the tensors of contracts have a batch dimension of 1, which their shapes leave out."""
    rules: EarlyExitRules
    reader: BodyReader
    builder: RequestBuilder
    timeout_s: float
    """The timeout of a unary request; that of a stream is in ``spec.stream``."""
    batch: BatchSpec | None = None
    """The declared ``batch:``; None without one."""
    call_items: int = 1
    """The most items of a call."""
    openai: OpenAIMapping | None = None
    """The compiled ``openai:`` declaration."""
    usage: UsageSpec | None = None
    """The tensors that count tokens; None if the model counts none."""
    reasoning: ReasoningOutput | None = None
    """Divides the answers under ``/v1/pipelines``."""
    exposes_errors: bool = False
    """Whether callers see the messages of models."""
    sequence_ids: SequenceIds = dataclasses.field(default_factory=SequenceIds)
    session: SessionTerms | None = None
    """None if the pipeline has no sessions."""
    is_of_session: bool = False
    """Whether requests may be made: each is a step of a session."""

    @property
    def raw_field(self) -> InputField | None:
        """The field of a body of raw bytes: the only required input, or the only file if none is required."""
        files = [each for each in self.inputs if each.is_file] or [each for each in self.inputs if each.takes_file]
        needed = [each for each in self.inputs if each.is_required] or files
        return needed[0] if len(needed) == 1 and any(each is needed[0] for each in files) else None

    @property
    def max_items(self) -> int:
        """The most items of a request."""
        return 1 if self.batch is None else self.batch.max_items

    def request_of_json(self, body: Body, given: Mapping[str, Any] = MappingProxyType({})) -> InferenceRequest:
        """``given``: values of further fields, which the body does not have.

        Raises InvalidJson, InvalidRequest or InvalidInput.
        """
        return self.request_of(self.reader.from_json(body, given))

    def request_of_form(self, parts: Mapping[str, Part]) -> InferenceRequest:
        """Raises InvalidInput."""
        return self.request_of(self.reader.from_form(parts))

    def request_of(self, values: Mapping[str, Any]) -> InferenceRequest:
        """Decoded values by field name -> a request whose types, shapes and data agree.

        Raises InvalidInput, or InvalidRequest for a model that runs no request outside of a sequence.
        """
        if self.sequence_ids.needed_by and not self.is_of_session:
            hint = f"Open one with POST /v1/pipelines/{self.name}/sessions."
            if self.session is None:
                hint = (
                    "An operator can declare `session: true` for the pipeline in gateway.yaml. Or call POST "
                    f"/v2/models/{self.spec.model}/infer with the parameters `sequence_id`, `sequence_start` and "
                    "`sequence_end`."
                )
            raise InvalidRequest(f"Model '{self.sequence_ids.needed_by}' needs a session.", hint=hint)
        return self.builder.request_of(values)

    def probe_of(self, body: Body) -> InferenceRequest:
        """A request that the gateway itself runs, or only checks if the pipeline has sessions.

        Raises the errors of :meth:`request_of_json`.
        """
        return (self if self.session is None else self.of_session()).request_of_json(body)

    def of_session(self) -> Self:
        """The pipeline as one session uses it."""
        return dataclasses.replace(self, is_of_session=True)

    def ending_request(self) -> InferenceRequest | None:
        """The declared request that ends a session's sequence; None without one. Raises InvalidInput."""
        values = None if self.spec.session is None else self.spec.session.end_inputs
        return None if values is None else self.of_session().request_of_json(orjson.dumps(values))

    @property
    def longest_timeout_s(self) -> float:
        """The longest deadline of a request, whole or as a stream."""
        stream = self.spec.stream
        return self.timeout_s if stream is None else max(self.timeout_s, stream.timeout_s)

    @property
    def sample_timeout_s(self) -> float:
        """The deadline of the sample, which may wait for its first output behind the requests of callers."""
        stream = self.spec.stream
        return self.timeout_s if stream is None else max(self.timeout_s, stream.first_output_s or 0.0)

    def stream_spec(self) -> StreamSpec:
        """Raises InvalidRequest where the pipeline does not stream."""
        if self.spec.stream is None:
            url = f"/v1/pipelines/{self.name}" if self.session is None else "/v1/sessions/{id}"
            raise InvalidRequest(
                f"This pipeline does not stream: POST {url} returns its whole answer.",
                hint="An operator can declare `stream: true` for it in gateway.yaml.",
            )
        return self.spec.stream

    def early_exit_of(self, error: GatewayError, request_id: str) -> str:
        """The reason of the early exit that the pipeline's rules see in an error. Raises the caller's error if none.

        A step of ``rejects_input`` names itself at the start of its message (``<model>: <text>``); the pipeline's own
        model need not.
        """
        upstream = error.upstream
        if upstream is None:
            raise error
        reason = self.rules.reason_of_error(upstream, request_id)
        if reason is not None:
            return reason
        message = self.rules.bare(upstream.message, request_id)
        if error.fault is not None:
            explain(error, self.graph)
        elif error.code == "model_error" and error.hint is None:
            name_failed_step(error, message, self.graph)
        if intended := self.rules.reason_but_for_code(upstream, request_id):
            error.hint = (
                f"The message matches the early exit '{intended}', but the code does not. A BLS script loses the code "
                "of the models it calls and must set the code again in its TritonError. For streams of a decoupled "
                "model, use code: any."
            )
        shown = self._refusal_of(error, upstream, message) if error.code == "model_error" else None
        if shown is None:
            shown = error
        else:
            shown.upstream, shown.failed_step = upstream, error.failed_step
        if self.exposes_errors:
            shown.detail += f" The model's message: {public_text(message)}"
        raise shown from error

    def _refusal_of(self, error: GatewayError, upstream: UpstreamError, message: str) -> GatewayError | None:
        """The error for a caller who can correct the request. ``message``: without Triton's prefixes."""
        refusal = refusal_of(self.spec.refusals, message)
        if refusal is not None or upstream.grpc_code not in ("INVALID_ARGUMENT", None):
            return refusal
        steps = self.spec.rejects_input
        is_own = upstream.grpc_code is not None and self.spec.model in steps
        if not is_own and not any(message.startswith(f"{step}: ") for step in steps):
            return None
        step = error.failed_step or self.spec.model
        read = self.graph.request_tensors_of(step)
        fields = [f"'{field.name}'" for field in self.inputs if field.tensor.name in read]
        reads = f" It reads {' and '.join(fields)}." if fields else ""
        return InvalidInput(
            f"{named_model(step, self.graph)} refused the input.{reads}",
            hint=_HINT,
        )


LONGEST_MESSAGE = 4096
"""Only this much of a message is searched."""
_HINT = "The gateway's log has the model's message in the line with this request id."
_DETAIL = {
    "context_length_exceeded": "The request is longer than the model's context.",
    "invalid_input": "The model refused the input.",
}
_PROBLEM = {
    "context_length_exceeded": "is longer than the model's context",
    "invalid_input": "is not accepted by the model",
}


def refusal_of(rules: Sequence[RefusalRule], message: str) -> ClientError | None:
    """Returns the caller's error of the first rule that matches the model's message, which the error does not show."""
    message = message[:LONGEST_MESSAGE]
    rule = next((each for each in rules if re.search(each.message_pattern, message)), None)
    if rule is None:
        return None
    kind = ContextLengthExceeded if rule.code == "context_length_exceeded" else InvalidInput
    problems = [] if rule.field is None else [FieldProblem(rule.field, _PROBLEM[rule.code])]
    return kind(rule.detail or _DETAIL[rule.code], hint=_HINT, errors=problems)
