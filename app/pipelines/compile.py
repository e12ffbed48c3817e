"""A pipeline's words and its model's live configuration -> a Pipeline, or the key that does not fit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.domain.model import ModelConfig, TensorSpec
from app.pipelines.body import BodyReader
from app.pipelines.early_exit import EarlyExitRules
from app.pipelines.fields import InputField, OutputField, ParameterField
from app.pipelines.file import nearest
from app.pipelines.graph import graph_of
from app.pipelines.kinds import kind_fits
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import ContractSpec, InputSpec, OutputSpec, PipelineSpec


class PipelineMismatch(Exception):
    """A pipeline's words do not fit its model. ``location`` is the path of the key below the pipeline."""

    def __init__(self, location: tuple[str | int, ...], text: str) -> None:
        super().__init__(text)
        self.location = location
        self.text = text


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a pipeline is compiled with besides its own words and its model."""

    timeout_s: float = 30.0
    early_exit_key: bytes | None = None


def compile_pipeline(
    name: str, spec: PipelineSpec, config: ModelConfig, models: Mapping[str, ModelConfig], surroundings: Surroundings
) -> Pipeline:
    """Raises PipelineMismatch. ``models``: those that a request runs through, by name."""
    size, batch = config.max_batch_size, spec.batch
    inputs = [
        InputField.compile(
            field, given, _tensor(config.inputs, given, ("inputs", field)), max_batch_size=size, batch=batch
        )
        for field, given in (_derived_inputs(spec, config) if spec.inputs is None else spec.inputs).items()
    ]
    parameters = [
        ParameterField.compile(field, given, _parameter_tensor(config, field, given.tensor), max_batch_size=size)
        for field, given in spec.parameters.items()
    ]
    outputs = [
        OutputField.compile(
            field, given, _tensor(config.outputs, given, ("outputs", field)), max_batch_size=size, batch=batch
        )
        for field, given in (_derived_outputs(config) if spec.outputs is None else spec.outputs).items()
    ]
    _check_whole(spec, config, inputs, parameters)
    graph = graph_of(config, models)
    return Pipeline(
        name=name,
        spec=spec,
        config=config,
        graph=graph,
        inputs=tuple(inputs),
        parameters=tuple(parameters),
        outputs=tuple(outputs),
        rules=EarlyExitRules(tuple(spec.early_exit), graph.ensembles, surroundings.early_exit_key),
        reader=BodyReader(name, [*inputs, *parameters]),
        timeout_s=spec.timeout_s or surroundings.timeout_s,
    )


def derived_spec(config: ModelConfig) -> PipelineSpec:
    """What a ready model is served as where no file says anything."""
    return PipelineSpec(model=config.name, stream={})  # type: ignore[arg-type]


def _derived_inputs(spec: PipelineSpec, config: ModelConfig) -> dict[str, InputSpec]:
    taken = {parameter.tensor for parameter in spec.parameters.values()}
    return {
        tensor.name: InputSpec(tensor=tensor.name, kind=_kind_of(tensor), optional=tensor.optional)
        for tensor in config.inputs
        if tensor.name not in taken
    }


def _derived_outputs(config: ModelConfig) -> dict[str, OutputSpec]:
    return {tensor.name: OutputSpec(tensor=tensor.name, kind=_kind_of(tensor)) for tensor in config.outputs}


def _kind_of(tensor: TensorSpec) -> Any:
    return "text" if tensor.datatype == "BYTES" else "number"


def _tensor(tensors: Iterable[TensorSpec], given: InputSpec | OutputSpec, location: tuple[str, str]) -> TensorSpec:
    tensor = _named(tensors, given.tensor, (*location, "tensor"))
    if not kind_fits(given.kind, tensor.datatype):
        raise PipelineMismatch((*location, "kind"), f"'{given.kind}' does not fit {tensor.datatype}")
    return tensor


def _named(tensors: Iterable[TensorSpec], name: str, location: tuple[str, ...]) -> TensorSpec:
    by_name = {tensor.name: tensor for tensor in tensors}
    if name not in by_name:
        raise PipelineMismatch(location, f"'{name}' is no such tensor of the model" + nearest(name, list(by_name)))
    return by_name[name]


def _parameter_tensor(config: ModelConfig, field: str, name: str | None) -> TensorSpec | None:
    return None if name is None else _named(config.inputs, name, ("parameters", field, "tensor"))


def _check_whole(
    spec: PipelineSpec, config: ModelConfig, inputs: list[InputField], parameters: list[ParameterField]
) -> None:
    """What no field sees alone: inputs left out; rules and contracts about what is not there."""
    given = {field.tensor.name for field in inputs} | {field.spec.tensor for field in parameters}
    for tensor in config.inputs:
        if tensor.name not in given and not tensor.optional:
            raise PipelineMismatch(("inputs",), f"leave out '{tensor.name}', which the model requires")
    for index, rule in enumerate(spec.early_exit):
        for key in ("missing", "empty"):
            for name in getattr(rule, key) or ():
                _named(config.outputs, name, ("early_exit", str(index), key))
    for name, contract in spec.contract.items():
        _named(config.outputs, name, ("contract", name))
        _check_max_items(contract, ("contract", name, "max_items"), parameters)
    if spec.batch and config.max_batch_size == 0:
        raise PipelineMismatch(("batch",), "is on, but the model has no batch dimension (max_batch_size is 0)")


def _check_max_items(contract: ContractSpec, location: tuple[str, ...], parameters: list[ParameterField]) -> None:
    names = [field.name for field in parameters if field.spec.type == "integer" and field.tensor is None]
    if isinstance(contract.max_items, str) and contract.max_items not in names:
        raise PipelineMismatch(
            location, f"'{contract.max_items}' is no integer parameter" + nearest(contract.max_items, names)
        )
