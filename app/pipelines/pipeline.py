"""A pipeline: one product endpoint over one Triton model, compiled once for the model's signature.

The values of a request, by field name -> the request to the model. Compiled for one pipeline.
"""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from msgspec.structs import replace

from app.codecs.kinds import encoded_json
from app.core.engine import PipelineLayer
from app.core.errors import (
    ClientError,
    ContextLengthExceeded,
    FieldProblem,
    GatewayError,
    InvalidInput,
    InvalidRequest,
    UpstreamError,
)
from app.core.inference import Deadline, Extension, InferenceRequest, Parameter, Tensor, bytes_array
from app.core.model import Capacity, ModelConfig, SequenceIds, TensorSpec
from app.pipelines.body import Body, BodyReader, Part
from app.pipelines.early_exit import EarlyExitRules
from app.pipelines.error_hints import explain, name_failed_step, named_model, public_text
from app.pipelines.graph import Graph
from app.pipelines.inputs import InputField
from app.pipelines.openai_mapping import OpenAIMapping, ReasoningOutput
from app.pipelines.openai_spec import UsageSpec
from app.pipelines.outputs import OutputField
from app.pipelines.parameters import ParameterField, repeated
from app.pipelines.spec import ADAPTER, STREAM_DEFAULTS, BatchSpec, PipelineSpec, StreamSpec


class CountLimits(Extension):
    """The values of the parameters that the outputs which count may reach, by output."""

    by_output: Mapping[str, float]


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
            request = replace(request, parameters={**request.parameters, name: expires_at_ms})
        for layer in self.layers:
            request = layer.extended(request)
        return request


@dataclass(frozen=True, eq=False, kw_only=True)
class Pipeline(Target):
    graph: Graph
    inputs: tuple[InputField, ...]
    parameters: tuple[ParameterField, ...]
    """Those that callers can set."""
    sent: tuple[ParameterField, ...]
    """Those that a request has, also if callers cannot set them."""
    json_tensors: tuple[TensorSpec, ...]
    """The text inputs with a JSON object of parameters. They are always sent."""
    outputs: tuple[OutputField, ...]
    text_runs: Sequence[OutputField]
    """The outputs that are pieces of a text, each with its own decoder. Reasoning is a part of such a text."""
    counts: Mapping[str, str]
    """The outputs that count what the responses have -> the parameter whose value they may reach."""
    contracts_take_batch: bool
    """Whether the tensors of contracts have a batch dimension of 1, which their shapes leave out."""
    rules: EarlyExitRules
    reader: BodyReader
    takes_traceparent: bool
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
    makes_sequence: bool = False
    """Whether each request becomes one of a sequence that the gateway makes."""

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
        if self.sequence_ids.needed_by and not self.makes_sequence:
            raise self.spec.needs_sequence(self.name, self.sequence_ids.needed_by)
        spec = self.spec
        problems: list[FieldProblem] = []
        if spec.adapters and ADAPTER in values:
            values = {**values, **spec.adapters[values[ADAPTER]]}
        tensors = self._input_tensors(values, problems)
        items = 1 if self.batch is None else _items_of(tensors, self.batch.max_items, problems)
        sent, parameters = self._add_parameters(values, items, tensors, problems) if self.sent else ({}, {})
        if problems:
            raise InvalidInput(f"'{problems[0].field}' {problems[0].problem}.", errors=problems)
        request = InferenceRequest(
            model=spec.model,
            version=spec.version,
            inputs=tuple(tensors),
            parameters=parameters,
            ends_by_hook=spec.cancel is not None,
            idempotent=spec.idempotent,
            takes_traceparent=self.takes_traceparent,
        )
        if not self.counts:
            return request
        limits = {output: float(sent[name]) for output, name in self.counts.items() if name in sent}
        return request.extended(CountLimits(by_output=limits))

    def _add_parameters(
        self, values: Mapping[str, Any], items: int, tensors: list[Tensor], problems: list[FieldProblem]
    ) -> tuple[dict[str, Any], dict[str, Parameter]]:
        """Adds the tensors of parameters. Returns all checked values, and the parameters of the request, by field."""
        sent, parameters = dict[str, Any](), dict[str, Parameter]()
        objects: dict[str, dict[str, Any]] = {tensor.name: {} for tensor in self.json_tensors}
        for field in self.sent:
            value = values.get(field.name, field.spec.default) if field.spec.send is None else field.spec.send
            if value is None:
                continue
            try:
                sent[field.name] = value = field.checked(value)
                if field.tensor is not None:
                    tensors.append(field.tensor_of(value, items))
                elif field.json_tensor is not None:
                    field.put(value, objects[field.json_tensor.name])
                else:
                    parameters[field.name] = value
            except ValueError as exc:
                problems.append(FieldProblem(field.name, str(exc)))
        for tensor in self.json_tensors:
            array = bytes_array([encoded_json(objects[tensor.name])], (1,))
            tensors.append(repeated(tensor, array, items if self.config.max_batch_size else None))
        return sent, parameters

    def _input_tensors(self, values: Mapping[str, Any], problems: list[FieldProblem]) -> list[Tensor]:
        tensors: list[Tensor] = []
        for field in self.inputs:
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

    def probe_of(self, body: Body) -> InferenceRequest:
        """A request that the gateway itself makes. Raises the errors of :meth:`request_of_json`."""
        return (self if self.spec.takes_requests else self.of_sequence()).request_of_json(body)

    def of_sequence(self) -> Self:
        """The pipeline as one sequence uses it."""
        return dataclasses.replace(self, makes_sequence=True)

    @property
    def longest_timeout_s(self) -> float:
        """The longest deadline of a request, whole or as a stream."""
        stream = self.spec.stream
        return self.timeout_s if stream is None else max(self.timeout_s, stream.timeout_s)

    def stream_spec(self, url: str = "") -> StreamSpec:
        """``url``: the address of a whole answer. Raises InvalidRequest where the pipeline does not stream."""
        if self.spec.stream is None:
            url = url or f"/v1/pipelines/{self.name}"
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
        refusal = self._refusal_of(error, upstream, message) if error.code == "model_error" else None
        if refusal is not None:
            refusal.upstream, refusal.failed_step = upstream, error.failed_step
        shown = refusal or error
        if self.exposes_errors:
            shown.detail += f" The model's message: {public_text(message)}"
        raise shown from error

    def _refusal_of(self, error: GatewayError, upstream: UpstreamError, message: str) -> GatewayError | None:
        """The error for a caller who can correct the request, without the model's message.

        ``message``: without Triton's prefixes.
        """
        for rule in self.spec.refusals:
            if re.search(rule.message_pattern, message[:LONGEST_MESSAGE]):
                kind, detail, problem = _REFUSALS[rule.code]
                problems = [] if rule.field is None else [FieldProblem(rule.field, problem)]
                return kind(rule.detail or detail, hint=_HINT, errors=problems)
        steps = self.spec.rejects_input if upstream.grpc_code in ("INVALID_ARGUMENT", None) else ()
        is_own = upstream.grpc_code is not None and self.spec.model in steps
        if not is_own and not any(message.startswith(f"{step}: ") for step in steps):
            return None
        step = error.failed_step or self.spec.model
        into = (edge for edge in self.graph.edges if edge.target.step is not None and edge.target.step.model == step)
        read = {edge.source.tensor.name for edge in into if edge.source.step is None}
        fields = [f"'{field.name}'" for field in self.inputs if field.tensor.name in read]
        reads = f" It reads {' and '.join(fields)}." if fields else ""
        return InvalidInput(f"{named_model(step, self.graph)} refused the input.{reads}", hint=_HINT)


LONGEST_MESSAGE = 4096
"""Only this much of a message is searched."""
_HINT = "The gateway's log has the model's message in the line with this request id."
_REFUSALS: dict[str, tuple[type[ClientError], str, str]] = {
    "context_length_exceeded": (
        ContextLengthExceeded,
        "The request is longer than the model's context.",
        "is longer than the model's context",
    ),
    "invalid_input": (InvalidInput, "The model refused the input.", "is not accepted by the model"),
}
"""By the code of a rule: the caller's error, its detail, and the problem of the rule's field."""


def _items_of(tensors: Sequence[Tensor], most: int, problems: list[FieldProblem]) -> int:
    """How many items the caller sent, the same of every input."""
    sizes = {tensor.shape[0] for tensor in tensors} or {1}
    size = sizes.pop()
    if sizes:
        problems.append(FieldProblem("batch", "has inputs with different numbers of items"))
    elif not 1 <= size <= most:
        problems.append(FieldProblem("batch", f"has {size} items; expected 1 to {most}"))
    return size
