"""Compiles a pipeline's fields against its model's live configuration, or reports the key that does not match."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.codecs.kinds import agree, declared_shape, is_one_content, kind_fits, shape_text
from app.core.inference import DTYPE_BY_DATATYPE
from app.core.model import ModelConfig, TensorSpec, largest_batch
from app.pipelines.fields import Field, InputField, ParameterField
from app.pipelines.mismatch import PipelineMismatch, mismatch_at, named, tensor_named
from app.pipelines.outputs import OutputField
from app.pipelines.spec import ADAPTER, InputSpec, OutputSpec, ParameterSpec, PipelineSpec


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


def has_rows(spec: PipelineSpec, config: ModelConfig) -> bool:
    """Whether a response has a row for each of several items. A decoupled model gets one item at a time."""
    return spec.batch is not None and not config.decoupled


def fields_of(
    spec: PipelineSpec, config: ModelConfig
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
            outputs.append(OutputField(name, output, tensor, size, has_rows=has_rows(spec, config)))
    return inputs, parameters, outputs


def _kind_of(tensor: TensorSpec) -> Any:
    return "text" if tensor.datatype == "BYTES" else "number"


def _tensor(tensors: Iterable[TensorSpec], given: InputSpec | OutputSpec) -> TensorSpec:
    tensor = tensor_named(tensors, given.tensor, ("tensor",))
    if tensor.datatype not in DTYPE_BY_DATATYPE:
        raise PipelineMismatch(("tensor",), f"has datatype {tensor.datatype}, which has no JSON form")
    if not kind_fits(given.kind, tensor):
        text = f"'{given.kind}' does not fit {tensor.datatype}"
        if given.kind == "number":
            text = f"is missing, and {tensor.datatype} can be several: write `kind: text`, `image`, `binary` or `json`"
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
    return replace(tensor, dims=(1,))  # which every check and schema knows as a single value


def adapter_fields(spec: PipelineSpec, parameters: Sequence[ParameterField]) -> list[ParameterField]:
    """The field that names an adapter, if there are any. It is not sent: it sets hidden parameters."""
    fields = {each.name: each for each in parameters}
    for adapter, values in spec.adapters.items():
        for name, value in values.items():
            with mismatch_at("adapters", adapter, name):
                fields[name].converted(value)
    text = "The adapter of the model."
    named_by = ParameterSpec(type="string", enum=[*spec.adapters] or None, optional=True, description=text)
    return [ParameterField(ADAPTER, named_by)] if spec.adapters else []


def call_items_of(spec: PipelineSpec, config: ModelConfig, models: Mapping[str, ModelConfig]) -> int:
    """The most items of a call. Raises PipelineMismatch."""
    most = largest_batch(config, models)
    if spec.batch is None:
        return max(most, 1)
    if most == 0:
        raise PipelineMismatch(("batch",), "is on, but the model has no batch dimension (max_batch_size is 0)")
    if spec.batch.parts is not None and spec.batch.parts > most:
        raise PipelineMismatch(("batch", "parts"), f"is {spec.batch.parts}, and the model takes {most} items at a time")
    return 1 if config.decoupled else spec.batch.parts or most


def check_fields(
    spec: PipelineSpec, config: ModelConfig, inputs: Sequence[InputField], parameters: Sequence[ParameterField]
) -> None:
    """Checks duplicate names and members, and missing or duplicate inputs. Raises PipelineMismatch."""
    members = [each for each in parameters if each.spec.member_of is not None]
    objects, taken = {(each.spec.member_of, each.place[0]) for each in members}, set[tuple[Any, ...]]()
    for each in members:
        text_tensor, (outer, name) = each.spec.member_of, each.place
        is_twice = (text_tensor, outer, name) in taken
        taken.add((text_tensor, outer, name))
        if is_twice or (not outer and (text_tensor, name) in objects):
            text = f"is the member '{name}' of '{text_tensor}', which another parameter is too"
            raise PipelineMismatch(("parameters", each.name), text)
    fields: list[tuple[str, Field]] = [("inputs", each) for each in inputs]
    fields += [("parameters", each) for each in parameters]
    for key, field in fields:
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
    given = [each.tensor.name for _, each in fields if each.tensor is not None]
    given += {each.json_tensor.name for each in parameters if each.json_tensor is not None}
    for tensor in config.inputs:
        if tensor.name not in given and not tensor.optional:
            raise PipelineMismatch(("inputs",), f"do not have '{tensor.name}', which the model requires")
        if given.count(tensor.name) > 1:
            raise PipelineMismatch(("inputs",), f"have '{tensor.name}' twice")


def check_rules(
    spec: PipelineSpec,
    config: ModelConfig,
    parameters: Sequence[ParameterField],
    settable: Collection[str],
    *,
    has_key: bool,
) -> None:
    """Checks what outputs, contracts, early exits and refusals refer to. Raises PipelineMismatch.

    ``settable``: the names of the fields that callers can set.
    """
    integers = {each.name: each for each in parameters if each.spec.type == "integer"}
    sent = {name: each for name, each in integers.items() if each.tensor is None and each.json_tensor is None}
    for name, output in (spec.outputs or {}).items():
        if output.reaches is not None:
            named(output.reaches, integers, "an integer parameter", "outputs", name, "reaches")
    for name, contract in spec.contract.items():
        with mismatch_at("contract", name):
            tensor = tensor_named(config.outputs, name, ())
            dims = (-1, *tensor.dims) if has_rows(spec, config) else tensor.dims
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
            named(refusal.field, dict.fromkeys(settable), "a field of the pipeline", "refusals", index, "field")
