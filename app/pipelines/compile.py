"""Compiles a pipeline's declaration against its model's live configuration, or reports the key that does not match."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from app.codecs.kinds import agree, declared_shape, is_one_content, kind_fits, shape_text
from app.core.errors import GatewayError
from app.core.inference import DTYPE_BY_DATATYPE
from app.core.model import ModelConfig, TensorSpec, capacity_of, largest_batch, sequence_ids_of, takes_traceparent
from app.pipelines.body import BodyReader
from app.pipelines.early_exit import EarlyExitRules
from app.pipelines.graph import graph_of
from app.pipelines.inputs import InputField
from app.pipelines.mismatch import PipelineMismatch, mismatch_at, named, tensor_named
from app.pipelines.openai_mapping import ReasoningOutput, compile_openai
from app.pipelines.outputs import OutputField
from app.pipelines.parameters import ParameterField, adapter_field
from app.pipelines.pipeline import Pipeline
from app.pipelines.resolve import resolved
from app.pipelines.spec import ContractSpec, InputSpec, OutputSpec, PipelineSpec


@dataclass(frozen=True, slots=True)
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


def compile_pipeline(
    name: str, spec: PipelineSpec, config: ModelConfig, models: Mapping[str, ModelConfig], context: CompileContext
) -> Pipeline:
    """``models``: the models that a request uses, by name. Raises PipelineMismatch."""
    spec = resolved(spec, config, context.tokenizers)
    inputs, sent, outputs = _inputs(spec, config), _parameters(spec, config), _outputs(spec, config)
    parameters = [field for field in sent if field.spec.is_settable]
    if spec.adapters:
        fields = {field.name: field for field in sent}
        for adapter, values in spec.adapters.items():
            for field_name, value in values.items():
                with mismatch_at("adapters", adapter, field_name):
                    fields[field_name].converted(value)
        parameters.append(adapter_field(list(spec.adapters)))
    graph, call_items = graph_of(config, models, spec.version), _call_items(spec, config, models)
    _check_whole(spec, config, inputs, sent)
    _check_rules(spec, config, has_key=context.early_exit_key is not None)
    for index, rule in enumerate(spec.refusals):
        if rule.field is not None:
            names = dict.fromkeys([*(each.name for each in inputs), *(each.name for each in parameters)])
            named(rule.field, names, "a field of the pipeline", "refusals", index, "field")
    with mismatch_at("inputs"):
        reader = BodyReader(name, [*inputs, *parameters])
    openai = None if spec.openai is None else compile_openai(spec.openai, config, [*inputs, *parameters], outputs)
    reasoning = ReasoningOutput.of(openai, inputs, outputs)
    if reasoning is not None:
        outputs.append(reasoning.field(outputs))
    pipeline = Pipeline(
        name=name,
        spec=spec,
        config=config,
        graph=graph,
        inputs=tuple(inputs),
        parameters=tuple(parameters),
        sent=tuple(sent),
        json_tensors=tuple(dict.fromkeys(each.json_tensor for each in sent if each.json_tensor is not None)),
        outputs=tuple(outputs),
        text_runs=[field for field in outputs if field.is_text_run and not field.is_reasoning],
        counts={field.name: field.spec.reaches for field in outputs if field.spec.reaches is not None},
        contracts_take_batch=config.max_batch_size > 0 and not _has_rows(spec, config),
        rules=EarlyExitRules(tuple(spec.early_exit), graph.ensembles, context.early_exit_key),
        reader=reader,
        takes_traceparent=takes_traceparent(config, models),
        timeout_s=spec.timeout_s or context.timeout_s,
        batch=spec.batch,
        call_items=call_items,
        openai=openai,
        usage=None if spec.openai is None else spec.openai.usage,
        reasoning=reasoning,
        exposes_errors=context.exposes_errors,
        capacity=capacity_of(config, models),
        sequence_ids=sequence_ids_of(config, models),
        layers=spec.layers_of(name, config, models),
    )
    for location, request in (item for layer in pipeline.layers for item in layer.requests.items()):
        try:
            pipeline.probe_of(orjson.dumps(request))
        except GatewayError as exc:
            problems = "; ".join(f"'{each.field}' {each.problem}" for each in exc.errors) or exc.detail
            raise PipelineMismatch(location, f"is not a valid request: {problems}") from exc
    return pipeline


def _inputs(spec: PipelineSpec, config: ModelConfig) -> list[InputField]:
    taken = {name for each in spec.parameters.values() for name in (each.tensor, each.member_of)}
    declared = spec.inputs
    if declared is None:
        free = [each for each in config.inputs if each.name not in taken]
        declared = {
            each.name: InputSpec(tensor=each.name, kind=_kind_of(each), optional=each.optional) for each in free
        }
    fields, max_items = [], None if spec.batch is None else spec.batch.max_items
    for name, given in declared.items():
        tensor = _tensor(config.inputs, given, ("inputs", name))
        with mismatch_at("inputs", name):
            fields.append(
                InputField.compile(name, given, tensor, max_batch_size=config.max_batch_size, max_items=max_items)
            )
    return fields


def _parameters(spec: PipelineSpec, config: ModelConfig) -> list[ParameterField]:
    fields = []
    for name, given in spec.parameters.items():
        tensor, json_tensor = (
            None if tensor is None else tensor_named(config.inputs, tensor, ("parameters", name, key))
            for key, tensor in (("tensor", given.tensor), ("member_of", given.member_of))
        )
        with mismatch_at("parameters", name):
            fields.append(ParameterField.compile(name, given, tensor, json_tensor, config.max_batch_size))
    return fields


def _outputs(spec: PipelineSpec, config: ModelConfig) -> list[OutputField]:
    declared = spec.outputs
    if declared is None:
        declared = {each.name: OutputSpec(tensor=each.name, kind=_kind_of(each)) for each in config.outputs}
    fields, has_rows = [], _has_rows(spec, config)
    for name, given in declared.items():
        tensor = _tensor(config.outputs, given, ("outputs", name))
        with mismatch_at("outputs", name):
            fields.append(
                OutputField.compile(name, given, tensor, max_batch_size=config.max_batch_size, batch=has_rows)
            )
    return fields


def _kind_of(tensor: TensorSpec) -> Any:
    return "text" if tensor.datatype == "BYTES" else "number"


def _has_rows(spec: PipelineSpec, config: ModelConfig) -> bool:
    """Whether a response has a row for each of several items. A decoupled model gets one item at a time."""
    return spec.batch is not None and not config.decoupled


def _call_items(spec: PipelineSpec, config: ModelConfig, models: Mapping[str, ModelConfig]) -> int:
    """The most items of a call. Raises PipelineMismatch."""
    most = largest_batch(config, models)
    if spec.batch is None:
        return max(most, 1)
    if most == 0:
        raise PipelineMismatch(("batch",), "is on, but the model has no batch dimension (max_batch_size is 0)")
    if spec.batch.parts is not None and spec.batch.parts > most:
        raise PipelineMismatch(("batch", "parts"), f"is {spec.batch.parts}, and the model takes {most} items at a time")
    return 1 if config.decoupled else spec.batch.parts or most


def _tensor(tensors: Iterable[TensorSpec], given: InputSpec | OutputSpec, location: tuple[str, str]) -> TensorSpec:
    tensor = tensor_named(tensors, given.tensor, (*location, "tensor"))
    if tensor.datatype not in DTYPE_BY_DATATYPE:
        raise PipelineMismatch((*location, "tensor"), f"has datatype {tensor.datatype}, which has no JSON form")
    if not kind_fits(given.kind, tensor):
        text = f"'{given.kind}' does not fit {tensor.datatype}"
        if given.kind == "number":
            text = f"is missing, and {tensor.datatype} can be several: write `kind: text`, `image`, `binary` or `json`"
        elif tensor.datatype in ("UINT8", "INT8") and given.kind != "json":
            text += f" {shape_text(tensor.dims)}: a file or text needs the dims [-1]"
        else:
            text += ": leave `kind` out for a tensor of numbers"
        raise PipelineMismatch((*location, "kind"), text)
    if not given.single or is_one_content(given.kind, tensor):
        return tensor
    if tensor.dims not in ((-1,), (1,), ()):
        text = f"is on, but '{tensor.name}' has the dims {shape_text(tensor.dims)}; it needs [-1]"
        raise PipelineMismatch((*location, "single"), text)
    return replace(tensor, dims=(1,))  # which every check and schema knows as a single value


def _check_whole(
    spec: PipelineSpec, config: ModelConfig, inputs: list[InputField], parameters: list[ParameterField]
) -> None:
    """Checks across fields: duplicate names, missing or duplicate inputs, and a missing batch dimension."""
    _check_members(parameters)
    fields: list[tuple[str, InputField | ParameterField]] = [("inputs", each) for each in inputs]
    for key, field in [*fields, *(("parameters", each) for each in parameters)]:
        needed = field.tensor
        if needed is not None and not needed.optional and field.spec.optional and field.spec.default is None:
            # Triton would pass a request without the tensor to the model.
            default = "`default: []`" if -1 in needed.dims and key == "inputs" else "a `default`"
            text = f"is true, and the model requires '{needed.name}': set {default}"
            raise PipelineMismatch((key, field.name, "optional"), f"{text}, or `optional` in the model's config.pbtxt")
    names = {field.name for field in inputs}
    for parameter in parameters:
        if parameter.name in names:
            text = "has the same name as an input of the model; rename one of them, under inputs or here"
            raise PipelineMismatch(("parameters", parameter.name), text)
    given = [field.tensor.name for field in inputs]
    given += [field.tensor.name for field in parameters if field.tensor is not None]
    given += {field.json_tensor.name for field in parameters if field.json_tensor is not None}
    for tensor in config.inputs:
        if tensor.name not in given and not tensor.optional:
            raise PipelineMismatch(("inputs",), f"do not have '{tensor.name}', which the model requires")
        if given.count(tensor.name) > 1:
            raise PipelineMismatch(("inputs",), f"have '{tensor.name}' twice")
    for name, output in (spec.outputs or {}).items():
        _check_limit(output.reaches, ("outputs", name, "reaches"), parameters)
    for name, contract in spec.contract.items():
        _check_shape(contract, tensor_named(config.outputs, name, ("contract", name)), spec, config)
        sent = [field for field in parameters if field.tensor is None and field.json_tensor is None]
        _check_limit(contract.max_items, ("contract", name, "max_items"), sent)


def _check_members(parameters: list[ParameterField]) -> None:
    """Rejects two parameters for one member of a JSON object, and a member that is both a value and an object."""
    taken: dict[tuple[str, str, str], str] = {}
    fields = [field for field in parameters if field.json_tensor is not None]
    for field in fields:
        tensor, (outer, name) = field.spec.member_of or "", field.place
        other = taken.setdefault((tensor, outer, name), field.name)
        objects = {each.place[0] for each in fields if each.spec.member_of == tensor}
        if other != field.name or (not outer and name in objects):
            text = f"is the member '{name}' of '{tensor}', which another parameter is too"
            raise PipelineMismatch(("parameters", field.name), text)


def _check_shape(contract: ContractSpec, tensor: TensorSpec, spec: PipelineSpec, config: ModelConfig) -> None:
    """Rejects a shape that no response of the model can have."""
    dims = (-1, *tensor.dims) if _has_rows(spec, config) else tensor.dims
    if contract.shape is None or not tensor.is_typed:
        return
    agreed = tuple(contract.shape)
    if not agree(agreed, dims) and declared_shape(agreed, dims) is None:
        text = f"is {shape_text(agreed)}, and the model's output '{tensor.name}' is {shape_text(dims)}"
        raise PipelineMismatch(("contract", tensor.name, "shape"), text)


def _check_rules(spec: PipelineSpec, config: ModelConfig, *, has_key: bool) -> None:
    for index, rule in enumerate(spec.early_exit):
        for key in ("missing", "empty"):
            for name in getattr(rule, key) or ():
                tensor_named(config.outputs, name, ("early_exit", index, key))
        if rule.error is not None and rule.error.signed and not has_key:
            raise PipelineMismatch(
                ("early_exit", index, "error", "signed"), "requires a key: set GATEWAY_EARLY_EXIT_KEY"
            )


def _check_limit(limit: int | str | None, location: tuple[str, ...], parameters: list[ParameterField]) -> None:
    """``limit``: may be the name of an integer parameter."""
    if isinstance(limit, str):
        named(limit, {x.name: x for x in parameters if x.spec.type == "integer"}, "an integer parameter", *location)
