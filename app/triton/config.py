"""A model's configuration, from Triton's protobuf message or the text of a ``config.pbtxt``."""

import re

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from app.core.model import ModelConfig, SequenceBatching, Step, TensorSpec
from app.core.text import nearest

_BYTES_TYPE = model_config_pb2.DataType.TYPE_STRING
_UNKNOWN_NAME = re.compile(r'"inference\.([A-Za-z.]+)" has no (?:field|value) named "?([A-Za-z0-9_]+)')
_TYPE_BY_OTHER_NAME = {
    "BYTES": "TYPE_STRING",
    "STR": "TYPE_STRING",
    "TEXT": "TYPE_STRING",
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "FLOAT32": "TYPE_FP32",
    "FLOAT64": "TYPE_FP64",
    "DOUBLE": "TYPE_FP64",
    "HALF": "TYPE_FP16",
    "BOOLEAN": "TYPE_BOOL",
    "INT": "TYPE_INT32",
    "LONG": "TYPE_INT64",
}
"""Datatype names of the Open Inference Protocol, numpy and torch -> Triton's name."""


def model_config_of(message: model_config_pb2.ModelConfig) -> ModelConfig:
    batching = message.dynamic_batching
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    return ModelConfig(
        name=message.name,
        backend=_backend_of(message),
        max_batch_size=message.max_batch_size,
        inputs=tuple(
            TensorSpec(each.name, _datatype_of(each.data_type), tuple(each.dims), each.optional)
            for each in message.input
        ),
        outputs=tuple(TensorSpec(each.name, _datatype_of(each.data_type), tuple(each.dims)) for each in message.output),
        decoupled=message.model_transaction_policy.decoupled,
        steps=tuple(
            Step(
                model=step.model_name,
                version="" if step.model_version <= 0 else str(step.model_version),
                input_map=tuple(sorted(step.input_map.items())),
                output_map=tuple(sorted(step.output_map.items())),
            )
            for step in message.ensemble_scheduling.step
        ),
        instance_count=sum(max(group.count, 1) * max(len(group.gpus), 1) for group in message.instance_group) or 1,
        parameters=tuple(sorted((name, value.string_value) for name, value in message.parameters.items())),
        limits_queue=any(policy.max_queue_size or policy.default_timeout_microseconds for policy in policies),
        joins_requests=message.HasField("dynamic_batching"),
        sequence=_sequence_of(message) if message.HasField("sequence_batching") else None,
        unjoinable_inputs=tuple(each.name for each in message.input if each.allow_ragged_batch or each.is_shape_tensor),
        caches_responses=message.response_cache.enable,
    )


def parse_config(text: str) -> model_config_pb2.ModelConfig:
    """Parses the text of a ``config.pbtxt``. Raises ValueError with the line of the mistake and the nearest name."""
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as exc:
        text = str(exc).removesuffix(".")
        if found := _UNKNOWN_NAME.search(text):
            kind, name = found.groups()
            known = _TYPE_BY_OTHER_NAME.get(name.removeprefix("TYPE_")) if kind == "DataType" else None
            text += f"; did you mean '{known}'?" if known else nearest(name, _names_in(kind))
        raise ValueError(text) from exc


def _names_in(kind: str) -> list[str]:
    """Returns the fields of a message or the values of an enum. ``kind``: its name, including the outer messages."""
    pool = model_config_pb2.DESCRIPTOR.pool
    try:
        return list(pool.FindMessageTypeByName(f"inference.{kind}").fields_by_name)
    except KeyError:
        return list(pool.FindEnumTypeByName(f"inference.{kind}").values_by_name)


def _sequence_of(message: model_config_pb2.ModelConfig) -> SequenceBatching:
    batching = message.sequence_batching
    controls = [control for each in batching.control_input for control in each.control]
    datatypes = [_datatype_of(each.data_type) for each in controls if each.kind == each.CONTROL_SEQUENCE_CORRID]
    # A script reads the flags of a request. Triton itself resets the state that it keeps for a model.
    is_told = any(each.kind == each.CONTROL_SEQUENCE_START for each in controls) or bool(batching.state)
    return SequenceBatching(
        datatypes[0] if datatypes else "",
        batching.iterative_sequence,
        idle_s=batching.max_sequence_idle_microseconds / 1e6 or SequenceBatching().idle_s,
        candidates=batching.oldest.max_candidate_sequences,
        knows_starts=is_told or _backend_of(message) in ("", "python"),
    )


def _backend_of(message: model_config_pb2.ModelConfig) -> str:
    if message.HasField("ensemble_scheduling") or message.platform == "ensemble":
        return "ensemble"
    return str(message.backend or message.platform)


def _datatype_of(data_type: int) -> str:
    """Returns the name without its prefix, except for TYPE_STRING, which is BYTES in the Open Inference Protocol."""
    return "BYTES" if data_type == _BYTES_TYPE else model_config_pb2.DataType.Name(data_type).removeprefix("TYPE_")
