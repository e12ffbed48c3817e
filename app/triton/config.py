"""A model's configuration, from Triton's protobuf message or the text of a ``config.pbtxt``."""

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from app.domain.model import ModelConfig, Step, TensorSpec

_BYTES_TYPE = model_config_pb2.DataType.TYPE_STRING


def model_config_of(message: model_config_pb2.ModelConfig) -> ModelConfig:
    return ModelConfig(
        name=message.name,
        backend=_backend_of(message),
        max_batch_size=message.max_batch_size,
        inputs=tuple(_input_of(spec) for spec in message.input),
        outputs=tuple(TensorSpec(spec.name, _datatype_of(spec.data_type), _dims_of(spec)) for spec in message.output),
        decoupled=message.model_transaction_policy.decoupled,
        steps=tuple(_step_of(step) for step in message.ensemble_scheduling.step),
        instance_count=sum(max(group.count, 1) * max(len(group.gpus), 1) for group in message.instance_group) or 1,
        parameters=tuple(sorted((name, value.string_value) for name, value in message.parameters.items())),
    )


def parse_config(text: str) -> model_config_pb2.ModelConfig:
    """Parses the text of a ``config.pbtxt``. Raises ValueError with the line of the mistake."""
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as exc:
        raise ValueError(str(exc)) from exc


def _backend_of(message: model_config_pb2.ModelConfig) -> str:
    if message.HasField("ensemble_scheduling") or message.platform == "ensemble":
        return "ensemble"
    return str(message.backend or message.platform)


def _input_of(spec: model_config_pb2.ModelInput) -> TensorSpec:
    return TensorSpec(spec.name, _datatype_of(spec.data_type), _dims_of(spec), spec.optional)


def _dims_of(spec: model_config_pb2.ModelInput | model_config_pb2.ModelOutput) -> tuple[int, ...]:
    return tuple(spec.dims)


def _datatype_of(data_type: int) -> str:
    """TYPE_STRING is BYTES in the Open Inference Protocol; the other names only lose their prefix."""
    return "BYTES" if data_type == _BYTES_TYPE else model_config_pb2.DataType.Name(data_type).removeprefix("TYPE_")


def _step_of(step: model_config_pb2.ModelEnsembling.Step) -> Step:
    return Step(
        model=step.model_name,
        version="" if step.model_version <= 0 else str(step.model_version),
        input_map=tuple(sorted(step.input_map.items())),
        output_map=tuple(sorted(step.output_map.items())),
    )
