"""A pipeline: one product endpoint over one Triton model, compiled once for the model's live configuration.

Compiling reports the key of the declaration that does not match. Then the values of a request, by field name, become
the request to the model.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import orjson

from app.codecs.kinds import agree, declared_shape, encoded_json, is_one_content, kind_fits, shape_text
from app.config.mismatch import PipelineMismatch, mismatch_at, named, tensor_named
from app.core import model
from app.core.engine import PipelineLayer
from app.core.errors import FieldProblem, GatewayError, InvalidInput, InvalidRequest
from app.core.inference import DTYPE_BY_DATATYPE, Extension, InferenceRequest, Parameter, Tensor, bytes_array
from app.pipelines.body import Body, BodyReader, Part
from app.pipelines.fields import Field, InputField, OutputField, ParameterField, repeated
from app.pipelines.file import resolved
from app.pipelines.model_errors import EarlyExitRules
from app.pipelines.models import graph_of
from app.pipelines.openai_mapping import OpenAIMapping, reasoning_output
from app.pipelines.spec import (
    ADAPTER,
    STREAM_DEFAULTS,
    InputSpec,
    OutputSpec,
    ParameterSpec,
    PipelineSpec,
    StreamSpec,
)
from app.steps.plan import SKIPPED


@dataclasses.dataclass(frozen=True, slots=True)
class CompileContext:
    """The inputs of a pipeline's compilation besides its declaration and its model."""

    timeout_s: float = 30.0
    early_exit_key: bytes | None = None
    exposes_errors: bool = False
    """Whether callers of pipelines see the messages of models."""
    exposes_oip_errors: bool = False
    """Whether callers of ``/v2`` do."""
    tokenizers: Path | None = None
    """A folder with the tokenizer folders of models with a preset, by the model's name."""


class CountLimits(Extension):
    """The values of the parameters that the outputs which count may reach, by output."""

    by_output: Mapping[str, float]


class Target:
    """What a call runs: a pipeline, or a model by its own name, which is a pipeline without fields."""

    layers: tuple[PipelineLayer, ...] = ()
    """The layers around the engine that its requests use."""

    def __init__(
        self, name: str, spec: PipelineSpec, config: model.ModelConfig, models: Mapping[str, model.ModelConfig]
    ) -> None:
        """``name``: in metrics and spans. ``models``: those that a request uses, by name."""
        self.name, self.spec, self.config = name, spec, config
        self.capacity = model.capacity_of(config, models)
        self.sequence_ids = model.sequence_ids_of(config, models)
        self.takes_traceparent = model.takes_traceparent(config, models)

    @property
    def stream_terms(self) -> StreamSpec:
        """The limits of a stream, also for one that is not declared."""
        return self.spec.stream or STREAM_DEFAULTS


class Pipeline(Target):
    makes_sequence = False
    """Whether each request becomes one of a sequence that the gateway makes."""

    def __init__(
        self,
        name: str,
        spec: PipelineSpec,
        config: model.ModelConfig,
        models: Mapping[str, model.ModelConfig],
        context: CompileContext,
    ) -> None:
        """``models``: the models that a request uses, by name. Raises PipelineMismatch."""
        spec = resolved(spec, config, context.tokenizers)
        super().__init__(name, spec, config, models)
        self.inputs, self.sent, self.outputs = _fields_of(spec, config)
        """``sent``: the parameters that a request has, also if callers cannot set them."""
        self.parameters = [each for each in self.sent if each.spec.is_settable]
        """Those that callers can set."""
        self.parameters += _adapter_fields(spec, self.sent)
        fields: list[Field] = [*self.inputs, *self.parameters]
        self.fields = {each.name: each for each in fields}
        """Those of a request."""
        self.graph = graph_of(config, models, spec.version)
        self.call_items = _call_items_of(spec, config, models)
        """The most items of a call."""
        self._check_fields()
        self._check_rules(has_key=context.early_exit_key is not None)
        with mismatch_at("inputs"):
            self.reader = BodyReader(name, self.fields)
        with mismatch_at("openai"):
            self.openai = None if spec.openai is None else OpenAIMapping(spec.openai, config, self.fields, self.outputs)
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
        self.contracts_take_batch = config.max_batch_size > 0 and not _has_rows(spec, config)
        """Whether the tensors of contracts have a batch dimension of 1, which their shapes leave out."""
        self.rules = EarlyExitRules(tuple(spec.early_exit), self.graph.ensembles, context.early_exit_key)
        self.may_exit = bool(spec.reasons)
        self.timeout_s = spec.timeout_s or context.timeout_s
        """The timeout of a unary request; that of a stream is in ``spec.stream``."""
        self.longest_timeout_s = self.timeout_s if spec.stream is None else max(self.timeout_s, spec.stream.timeout_s)
        """The longest deadline of a request, whole or as a stream."""
        self.batch, self.max_items = spec.batch, 1 if spec.batch is None else spec.batch.max_items
        """``max_items``: the most items of a request."""
        self.exposes_errors = context.exposes_errors
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

    def _check_fields(self) -> None:
        """Checks duplicate names and members, and missing or duplicate inputs. Raises PipelineMismatch."""
        members = [each for each in self.sent if each.spec.member_of is not None]
        objects, taken = {(each.spec.member_of, each.place[0]) for each in members}, set[tuple[Any, ...]]()
        for each in members:
            text_tensor, (outer, name) = each.spec.member_of, each.place
            is_twice = (text_tensor, outer, name) in taken
            taken.add((text_tensor, outer, name))
            if is_twice or (not outer and (text_tensor, name) in objects):
                text = f"is the member '{name}' of '{text_tensor}', and so is another parameter"
                raise PipelineMismatch(("parameters", each.name), text)
        fields: list[tuple[str, Field]] = [("inputs", each) for each in self.inputs]
        fields += [("parameters", each) for each in self.sent]
        for key, field in fields:
            needed = field.tensor
            if needed is not None and not needed.optional and field.spec.optional and field.spec.default is None:
                # Triton would pass a request without the tensor to the model.
                default = "`default: []`" if -1 in needed.dims and key == "inputs" else "a `default`"
                text = f"is true, and the model requires '{needed.name}': set {default}, or `optional` in the model's"
                raise PipelineMismatch((key, field.name, "optional"), f"{text} config.pbtxt")
            if key == "parameters" and any(field.name == each.name for each in self.inputs):
                text = "has the same name as an input of the model; rename one of them, under inputs or here"
                raise PipelineMismatch((key, field.name), text)
        given = [each.tensor.name for _, each in fields if each.tensor is not None]
        given += {each.json_tensor.name for each in self.sent if each.json_tensor is not None}
        for tensor in self.config.inputs:
            if tensor.name not in given and not tensor.optional:
                raise PipelineMismatch(("inputs",), f"do not have '{tensor.name}', which the model requires")
            if given.count(tensor.name) > 1:
                raise PipelineMismatch(("inputs",), f"have '{tensor.name}' twice")

    def _check_rules(self, *, has_key: bool) -> None:
        """Checks what outputs, contracts, early exits and refusals refer to. Raises PipelineMismatch."""
        spec, config = self.spec, self.config
        integers = {each.name: each for each in self.sent if each.spec.type == "integer"}
        sent = {name: each for name, each in integers.items() if each.tensor is None and each.json_tensor is None}
        for name, output in (spec.outputs or {}).items():
            if output.reaches is not None:
                named(output.reaches, integers, "an integer parameter", "outputs", name, "reaches")
        for name, contract in spec.contract.items():
            with mismatch_at("contract", name):
                tensor = tensor_named(config.outputs, name, ())
                dims = (-1, *tensor.dims) if _has_rows(spec, config) else tensor.dims
                agreed = tuple(contract.shape or ())
                is_possible = agree(agreed, dims) or declared_shape(agreed, dims) is not None
                if contract.shape is not None and tensor.is_typed and not is_possible:
                    text = f"is {shape_text(agreed)}, and the model's output '{name}' is {shape_text(dims)}"
                    raise PipelineMismatch(("shape",), text)
                if isinstance(contract.max_items, str):
                    named(contract.max_items, sent, "an integer parameter", "max_items")
        for index, rule in enumerate(spec.early_exit):
            with mismatch_at("early_exit", index):
                for key, names in (("missing", rule.missing), ("empty", rule.empty)):
                    for name in names or ():
                        tensor_named(config.outputs, name, (key,))
                if rule.error is not None and rule.error.signed and not has_key:
                    raise PipelineMismatch(("error", "signed"), "requires a key: set GATEWAY_EARLY_EXIT_KEY")
        for index, refusal in enumerate(spec.refusals):
            if refusal.field is not None:
                named(refusal.field, self.fields, "a field of the pipeline", "refusals", index, "field")

    @property
    def raw_field(self) -> InputField | None:
        """The field of a body of raw bytes: the only required input, or the only file if none is required."""
        files = [each for each in self.inputs if each.is_file] or [each for each in self.inputs if each.takes_file]
        needed = [each for each in self.inputs if each.is_required] or files
        return needed[0] if len(needed) == 1 and any(each is needed[0] for each in files) else None

    def request_of_json(self, body: Body) -> InferenceRequest:
        """Raises InvalidJson, InvalidRequest or InvalidInput."""
        return self.request_of(self.reader.from_json(body))

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


def _has_rows(spec: PipelineSpec, config: model.ModelConfig) -> bool:
    """Whether a response has a row for each of several items. A decoupled model gets one item at a time."""
    return spec.batch is not None and not config.decoupled


def _fields_of(
    spec: PipelineSpec, config: model.ModelConfig
) -> tuple[list[InputField], list[ParameterField], list[OutputField]]:
    """The declared fields, or one for each tensor of the model. Raises PipelineMismatch."""
    size, max_items = config.max_batch_size, None if spec.batch is None else spec.batch.max_items
    inputs, parameters, outputs = list[InputField](), list[ParameterField](), list[OutputField]()
    declared_inputs, declared_outputs = spec.inputs, spec.outputs
    if declared_inputs is None:
        taken = {name for each in spec.parameters.values() for name in (each.tensor, each.member_of)}
        free = [each for each in config.inputs if each.name not in taken]
        declared_inputs = {
            each.name: InputSpec(tensor=each.name, kind=_kind_of(each), optional=each.optional) for each in free
        }
    if declared_outputs is None:
        declared_outputs = {each.name: OutputSpec(tensor=each.name, kind=_kind_of(each)) for each in config.outputs}
    if any(each.optional for each in (spec.steps or {}).values()):
        declared_outputs = {**declared_outputs, SKIPPED: OutputSpec(tensor=SKIPPED, kind="text")}
    for name, given in declared_inputs.items():
        with mismatch_at("inputs", name):
            inputs.append(InputField(name, given, _tensor(config.inputs, given), size, max_items))
    for name, parameter in spec.parameters.items():
        with mismatch_at("parameters", name):
            tensor, json_tensor = (
                None if tensor is None else tensor_named(config.inputs, tensor, (key,))
                for key, tensor in (("tensor", parameter.tensor), ("member_of", parameter.member_of))
            )
            parameters.append(ParameterField(name, parameter, tensor, json_tensor, size))
    for name, output in declared_outputs.items():
        with mismatch_at("outputs", name):
            tensor = _tensor(config.outputs, output)
            outputs.append(OutputField(name, output, tensor, size, has_rows=_has_rows(spec, config)))
    return inputs, parameters, outputs


def _kind_of(tensor: model.TensorSpec) -> Any:
    return "text" if tensor.datatype == "BYTES" else "number"


def _tensor(tensors: Iterable[model.TensorSpec], given: InputSpec | OutputSpec) -> model.TensorSpec:
    name = given.source.text if isinstance(given, OutputSpec) else given.tensor
    tensor = tensor_named(tensors, name, ("tensor",))
    if tensor.datatype not in DTYPE_BY_DATATYPE:
        raise PipelineMismatch(("tensor",), f"has datatype {tensor.datatype}, which has no JSON form")
    if not kind_fits(given.kind, tensor):
        text = f"'{given.kind}' does not fit {tensor.datatype}"
        if given.kind == "number":
            text = f"is missing: a {tensor.datatype} tensor needs `kind: text`, `image`, `binary` or `json`"
        elif tensor.datatype in ("UINT8", "INT8") and given.kind != "json":
            text += f" {shape_text(tensor.dims)}: a file or text needs the dims [-1]"
        else:
            text += ": leave `kind` out for a tensor of numbers"
        raise PipelineMismatch(("kind",), text)
    if not given.single or is_one_content(given.kind, tensor):
        return tensor
    if tensor.dims not in ((-1,), (1,), ()):
        text = f"is on, but '{tensor.name}' has the dims {shape_text(tensor.dims)}; it needs [-1]"
        raise PipelineMismatch(("single",), text)
    return dataclasses.replace(tensor, dims=(1,))  # which every check and schema knows as a single value


def _adapter_fields(spec: PipelineSpec, parameters: Sequence[ParameterField]) -> list[ParameterField]:
    """The field that names an adapter, if there are any. It is not sent: it sets hidden parameters."""
    fields = {each.name: each for each in parameters}
    for adapter, values in spec.adapters.items():
        for name, value in values.items():
            with mismatch_at("adapters", adapter, name):
                fields[name].converted(value)
    text = "The adapter of the model."
    named_by = ParameterSpec(type="string", enum=[*spec.adapters] or None, optional=True, description=text)
    return [ParameterField(ADAPTER, named_by)] if spec.adapters else []


def _call_items_of(spec: PipelineSpec, config: model.ModelConfig, models: Mapping[str, model.ModelConfig]) -> int:
    """The most items of a call. Raises PipelineMismatch."""
    most = model.largest_batch(config, models)
    if spec.batch is None:
        return max(most, 1)
    if most == 0:
        raise PipelineMismatch(("batch",), "is on, but the model has no batch dimension (max_batch_size is 0)")
    if spec.batch.parts is not None and spec.batch.parts > most:
        raise PipelineMismatch(("batch", "parts"), f"is {spec.batch.parts}, and the model takes {most} items at a time")
    return 1 if config.decoupled else spec.batch.parts or most
