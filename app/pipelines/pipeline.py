"""A pipeline: one product endpoint over one Triton model, compiled once for the model's signature.

The values of a request, by field name -> the request to the model. Compiled for one pipeline.
"""

import copy
import dataclasses
import re
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import orjson
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
from app.core.model import Capacity, ModelConfig, capacity_of, sequence_ids_of, takes_traceparent
from app.pipelines.body import Body, BodyReader, Part
from app.pipelines.compile import (
    CompileContext,
    adapter_fields,
    call_items_of,
    check_fields,
    check_rules,
    fields_of,
    has_rows,
)
from app.pipelines.fields import Field, InputField, repeated
from app.pipelines.file import resolved
from app.pipelines.graph import graph_of
from app.pipelines.mismatch import PipelineMismatch, mismatch_at
from app.pipelines.model_errors import EarlyExitRules, explain, name_failed_step, named_model, public_text
from app.pipelines.openai_mapping import OpenAIMapping, reasoning_output
from app.pipelines.spec import ADAPTER, STREAM_DEFAULTS, PipelineSpec, StreamSpec


class CountLimits(Extension):
    """The values of the parameters that the outputs which count may reach, by output."""

    by_output: Mapping[str, float]


@dataclasses.dataclass(eq=False, kw_only=True)
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


class Pipeline(Target):
    makes_sequence = False
    """Whether each request becomes one of a sequence that the gateway makes."""

    def __init__(
        self,
        name: str,
        spec: PipelineSpec,
        config: ModelConfig,
        models: Mapping[str, ModelConfig],
        context: CompileContext,
    ) -> None:
        """``models``: the models that a request uses, by name. Raises PipelineMismatch."""
        spec = resolved(spec, config, context.tokenizers)
        super().__init__(name=name, spec=spec, config=config, capacity=capacity_of(config, models))
        self.inputs, self.sent, self.outputs = fields_of(spec, config)
        """``sent``: the parameters that a request has, also if callers cannot set them."""
        self.parameters = [each for each in self.sent if each.spec.is_settable]
        """Those that callers can set."""
        self.parameters += adapter_fields(spec, self.sent)
        fields: list[Field] = [*self.inputs, *self.parameters]
        self.graph = graph_of(config, models, spec.version)
        self.call_items = call_items_of(spec, config, models)
        """The most items of a call."""
        check_fields(spec, config, self.inputs, self.sent)
        check_rules(spec, config, self.sent, [each.name for each in fields], has_key=context.early_exit_key is not None)
        with mismatch_at("inputs"):
            self.reader = BodyReader(name, fields)
        self.openai: OpenAIMapping | None = None
        if spec.openai is not None:
            with mismatch_at("openai"):
                self.openai = OpenAIMapping(spec.openai, config, fields, self.outputs)
        self.usage = None if spec.openai is None else spec.openai.usage
        """The tensors that count tokens; None if the model counts none."""
        reasoning = reasoning_output(self.openai, self.outputs)
        self.divided = None if reasoning is None or self.openai is None else self.openai.chat
        """The form whose text is divided under ``/v1/pipelines``: its reasoning is an output of its own."""
        self.text_runs = [each for each in self.outputs if each.is_text_run]
        """The outputs that are pieces of a text, each with its own decoder. Reasoning is a part of such a text."""
        self.counts = {each.name: each.spec.reaches for each in self.outputs if each.spec.reaches is not None}
        """The outputs that count what the responses have -> the parameter whose value they may reach."""
        self.outputs += [] if reasoning is None else [reasoning]
        self.empty_values: dict[str, Any] = {
            each.name: "" if config.decoupled and each.is_text_run else each.empty_value for each in self.outputs
        }
        """The typed empty value of every output."""
        self.json_tensors = list(dict.fromkeys(each.json_tensor for each in self.sent if each.json_tensor is not None))
        """The text inputs with a JSON object of parameters. They are always sent."""
        self.contracts_take_batch = config.max_batch_size > 0 and not has_rows(spec, config)
        """Whether the tensors of contracts have a batch dimension of 1, which their shapes leave out."""
        self.rules = EarlyExitRules(tuple(spec.early_exit), self.graph.ensembles, context.early_exit_key)
        self.timeout_s = spec.timeout_s or context.timeout_s
        """The timeout of a unary request; that of a stream is in ``spec.stream``."""
        self.longest_timeout_s = self.timeout_s if spec.stream is None else max(self.timeout_s, spec.stream.timeout_s)
        """The longest deadline of a request, whole or as a stream."""
        self.batch, self.max_items = spec.batch, 1 if spec.batch is None else spec.batch.max_items
        """``max_items``: the most items of a request."""
        self.takes_traceparent = takes_traceparent(config, models)
        self.exposes_errors = context.exposes_errors
        self.sequence_ids = sequence_ids_of(config, models)
        self.layers = spec.layers_of(name, config, models)
        self._check_layers()

    def _check_layers(self) -> None:
        """Checks the layers' own requests. Raises PipelineMismatch."""
        for location, request in (item for layer in self.layers for item in layer.requests.items()):
            try:
                self.probe_of(orjson.dumps(request))
            except GatewayError as exc:
                problems = "; ".join(f"'{each.field}' {each.problem}" for each in exc.errors) or exc.detail
                raise PipelineMismatch(location, f"is not a valid request: {problems}") from exc

    @property
    def raw_field(self) -> InputField | None:
        """The field of a body of raw bytes: the only required input, or the only file if none is required."""
        files = [each for each in self.inputs if each.is_file] or [each for each in self.inputs if each.takes_file]
        needed = [each for each in self.inputs if each.is_required] or files
        return needed[0] if len(needed) == 1 and any(each is needed[0] for each in files) else None

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
        items = 1
        if self.batch is not None:
            sizes = {tensor.shape[0] for tensor in tensors} or {1}
            items = sizes.pop()
            if sizes:
                problems.append(FieldProblem("batch", "has inputs with different numbers of items"))
            elif not 1 <= items <= self.max_items:
                problems.append(FieldProblem("batch", f"has {items} items; expected 1 to {self.max_items}"))
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

    def probe_of(self, body: Body) -> InferenceRequest:
        """A request that the gateway itself makes. Raises the errors of :meth:`request_of_json`."""
        return (self if self.spec.takes_requests else self.of_sequence()).request_of_json(body)

    def of_sequence(self) -> Self:
        """The pipeline as one sequence uses it."""
        pipeline = copy.copy(self)
        pipeline.makes_sequence = True
        return pipeline

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
