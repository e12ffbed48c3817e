"""Converts the domain's inference to Triton's protobuf messages and back, and other answers of Triton; pure.

Tensors travel as raw little-endian bytes (``raw_input_contents``, ``raw_output_contents``), BYTES elements each behind
a 4-byte length. Source: Open Inference Protocol, "Tensor Data"; Triton's ``grpc_service.proto``.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.grpc import service_pb2

from app.core.engine import Document
from app.core.errors import PayloadTooLarge, UpstreamProtocol
from app.core.inference import (
    BYTES,
    DTYPE_BY_DATATYPE,
    Buffer,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    TraceContext,
    bytes_array,
    elements_in,
    raw_parts,
)
from app.core.model import ModelConfig, SequenceBatching, Step, TensorSpec
from app.grpc.rpc import Metadata
from app.shared_memory.leases import Lease, TensorSlot
from app.triton.connect import MAX_MESSAGE_BYTES
from app.triton.grpc_errors import TOO_LARGE

FINAL_RESPONSE = "triton_final_response"
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
TRACEPARENT = "traceparent"
_RequestedOutput = tuple[str, TensorSlot | None, int]
"""A requested output: its name, its slot in shared memory or None, and the number of classes or 0."""

_RAW_INPUT = service_pb2.ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | 2
"""The tag of one element: the number of the field, and the wire type for bytes."""
_MAX_DIMENSIONS = 32
_MAX_EMPTY_LISTS = 65_536
"""Limit on the product of the other dimensions of an output that has a dimension 0."""


def request_message(request: InferenceRequest, lease: Lease | None = None, *, streamed: bool = False) -> bytes:
    """Serializes a ModelInferRequest. Raises PayloadTooLarge if Triton would not accept the message.

    The parts of a protobuf message can be serialized separately and then concatenated. The part that all requests to a
    model share is serialized once. The bytes of the tensors are copied only once; protobuf would copy them several
    times.

    ``lease``: the shared memory of the large tensors; None: the message contains all tensors. ``streamed``: Triton must
    mark the last response, because otherwise a stream would never end.
    """
    message = service_pb2.ModelInferRequest(id=request.request_id)
    if streamed:
        message.parameters[EMPTY_FINAL_RESPONSE].bool_param = True
    for name, value in request.parameters.items():
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value if value < 2**63 else value - 2**64  # a sequence id: Triton reads it unsigned
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value
    if request.takes_traceparent and request.trace is not None:
        message.parameters[TRACEPARENT].string_param = request.trace.traceparent
    inputs = tuple([(tensor.name, tensor.datatype, tensor.array.shape) for tensor in request.inputs])
    slots, out_slots = ((), ()) if lease is None else (lease.inputs, lease.outputs)
    if request.outputs:
        slot_of = dict(out_slots)
        outputs = tuple([(each.name, slot_of.get(each.name), each.classification) for each in request.outputs])
    else:  # without any: Triton sends all outputs over the wire
        outputs = tuple([(name, slot, 0) for name, slot in out_slots])
    signature = _signature_part(request.model, request.version, inputs, slots, outputs)
    parts: list[Buffer] = [signature, message.SerializeToString()]
    for tensor, slot in zip_longest(request.inputs, slots):
        if slot is None:
            raw = raw_parts(tensor)
            parts += (_raw_input_head(sum(map(len, raw))), *raw)
    if sum(map(len, parts)) > MAX_MESSAGE_BYTES:
        raise PayloadTooLarge(TOO_LARGE)
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _signature_part(
    model: str,
    version: str,
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...],
    slots: tuple[TensorSlot | None, ...],
    outputs: tuple[_RequestedOutput, ...],
) -> bytes:
    """Serializes the part that all requests to a model share. ``inputs``: name, datatype and shape of each input."""
    message = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    for (name, datatype, shape), slot in zip_longest(inputs, slots):
        _set_slot(message.inputs.add(name=name, datatype=datatype, shape=shape), slot)
    for name, slot, classification in outputs:
        output = message.outputs.add(name=name)
        _set_slot(output, slot)
        if classification:
            output.parameters["classification"].int64_param = classification
    return message.SerializeToString()  # type: ignore[no-any-return]


def _set_slot(tensor: Any, slot: TensorSlot | None) -> None:
    """Sets the location of a tensor in shared memory. Source: Triton, "Shared-Memory Extension"."""
    if slot is not None:
        tensor.parameters["shared_memory_region"].string_param = slot.region
        tensor.parameters["shared_memory_offset"].int64_param = slot.offset
        tensor.parameters["shared_memory_byte_size"].int64_param = slot.size


@lru_cache(maxsize=256)
def _raw_input_head(size: int) -> bytes:
    """Returns the tag and the length that precede ``size`` bytes. Source: protobuf, "Encoding", "Base 128 Varints"."""
    head = bytearray((_RAW_INPUT,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def trace_metadata(trace: TraceContext) -> Metadata:
    """Returns gRPC metadata that makes Triton's spans children of the caller's span.

    Only for a sampled trace: Triton 2.51 records every request that has a parent, and ignores the sampled flag.
    """
    if not trace.is_sampled:
        return ()
    state = (("tracestate", trace.state),) if trace.state else ()
    return ((TRACEPARENT, trace.traceparent), *state)


class _Output(NamedTuple):
    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int
    """The number of its bytes, or of its elements if these are of BYTES."""


class _Head(NamedTuple):
    """A response without its id and the bytes of its tensors, and what that means."""

    message: service_pb2.ModelInferResponse
    outputs: tuple[_Output, ...]
    is_final: bool
    version: str


class RepeatedHeads:
    """Decodes responses. Most differ from an earlier response of their model only in the bytes of their tensors.

    The comparison saves half of the decoding, 2.6 us of a small POST.
    """

    def __init__(self) -> None:
        self._heads: dict[str, _Head] = {}

    def response_of(
        self,
        model: str,
        message: service_pb2.ModelInferResponse,
        lease: Lease | None = None,
        *,
        streamed: bool = False,
    ) -> InferenceResponse:
        """Decodes a response, and removes its id and its tensors. Raises UpstreamProtocol.

        ``lease``: the shared memory of the large outputs. ``streamed``: whether a mark shows the last response.
        """
        raw_contents = message.raw_output_contents[:]
        message.ClearField("raw_output_contents")
        message.ClearField("id")
        head = self._heads.get(model)
        if head is None or head.message != message:
            known = service_pb2.ModelInferResponse()
            known.CopyFrom(message)  # without the memory of the tensors
            is_final = FINAL_RESPONSE in message.parameters and message.parameters[FINAL_RESPONSE].bool_param
            head = self._heads[model] = _Head(known, _outputs_of(message), is_final, message.model_version)
        if len(raw_contents) != len(head.outputs):
            raise UpstreamProtocol("Triton answered tensors without their raw contents.")
        tensors = {}
        for (name, datatype, dtype, shape, size), raw in zip(head.outputs, raw_contents):  # noqa: B905 - of equal length
            if datatype == BYTES:
                elements, is_whole = elements_in(raw)
                if not is_whole or len(elements) != size:
                    raise _unfitting(name, shape)
                tensors[name] = Tensor(name, datatype, bytes_array(elements, shape))
                continue
            content = raw if raw or lease is None else lease.output(name, size) or raw
            if len(content) != size:
                raise _unfitting(name, shape)
            tensors[name] = Tensor(name, datatype, np.ndarray(shape, dtype, content))
        return InferenceResponse(tensors, head.is_final or not streamed, head.version)


def _outputs_of(message: service_pb2.ModelInferResponse) -> tuple[_Output, ...]:
    """Raises UpstreamProtocol for an unknown datatype or an impossible shape.

    numpy does not support some shapes, and the empty lists of others would fill the memory: [2**40, 0].
    """
    outputs = []
    for output in message.outputs[:]:
        dtype, shape = DTYPE_BY_DATATYPE.get(output.datatype), tuple(output.shape[:])
        if dtype is None:
            raise UpstreamProtocol(f"Output '{output.name[:128]}' has a datatype that this gateway does not know.")
        smallest = min(shape, default=1)
        is_possible = smallest > 0 or (smallest == 0 and math.prod(filter(None, shape)) <= _MAX_EMPTY_LISTS)
        if not is_possible or len(shape) > _MAX_DIMENSIONS:
            raise _unfitting(output.name, shape)
        size = math.prod(shape) * (1 if dtype.kind == "O" else dtype.itemsize)
        outputs.append(_Output(output.name, output.datatype, dtype, shape, size))
    return tuple(outputs)


def _unfitting(name: str, shape: tuple[int, ...]) -> UpstreamProtocol:
    text = f"The bytes of output '{name[:128]}' do not fit its shape {str(list(shape))[:128]}."
    return UpstreamProtocol(text)


DOCUMENT_REQUESTS: dict[Document, Any] = {
    "metadata": service_pb2.ModelMetadataRequest,
    "config": service_pb2.ModelConfigRequest,
    "stats": service_pb2.ModelStatisticsRequest,
    "server": lambda **_: service_pb2.ServerMetadataRequest(),
}


def document_of(value: Any, field: Any = None) -> Any:
    """Converts the response to one of the ``DOCUMENT_REQUESTS`` to the JSON of Triton's HTTP endpoint.

    The JSON converter of protobuf is not suitable: it writes 64-bit integers as strings and omits default values.
    ``field``: the descriptor of the value's field, for a part of the response.
    """
    if isinstance(value, Message):
        return {
            each.name: document_of(getattr(value, each.name), each)
            for each in value.DESCRIPTOR.fields
            if not each.has_presence or value.HasField(each.name)
        }
    if isinstance(value, Mapping):
        of_value = field.message_type.fields_by_name["value"]
        return {str(key): document_of(value[key], of_value) for key in value}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [document_of(each, field) for each in value]
    known = None if field.enum_type is None else field.enum_type.values_by_number.get(value)
    return value if known is None else known.name


def model_config_of(message: pb.ModelConfig) -> ModelConfig:
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


def _sequence_of(message: pb.ModelConfig) -> SequenceBatching:
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


def _backend_of(message: pb.ModelConfig) -> str:
    if message.HasField("ensemble_scheduling") or message.platform == "ensemble":
        return "ensemble"
    return str(message.backend or message.platform)


def _datatype_of(data_type: int) -> str:
    """Returns the name without its prefix, except for TYPE_STRING, which is BYTES in the Open Inference Protocol."""
    return "BYTES" if data_type == pb.DataType.TYPE_STRING else pb.DataType.Name(data_type).removeprefix("TYPE_")
