"""Converts the domain's inference to Triton's protobuf messages and back, and other answers of Triton to JSON; pure.

Tensors travel as raw little-endian bytes (``raw_input_contents``, ``raw_output_contents``), BYTES elements each behind
a 4-byte length. Source: Open Inference Protocol, "Tensor Data"; Triton's ``grpc_service.proto``.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message
from msgspec import Struct
from tritonclient.grpc import service_pb2

from app.core.engine import Document
from app.core.errors import UpstreamProtocol
from app.core.inference import (
    BYTES,
    DTYPE_BY_DATATYPE,
    Buffer,
    InferenceRequest,
    InferenceResponse,
    Parameter,
    Tensor,
    bytes_array,
    elements_in,
    raw_parts,
)
from app.shared_memory.leases import Lease, TensorSlot

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


def request_parts(request: InferenceRequest, lease: Lease | None = None) -> list[Buffer]:
    """Serializes a ModelInferRequest. The caller joins the parts.

    The parts of a protobuf message can be serialized separately and then concatenated. The part that all requests to a
    model share is serialized once. The bytes of the tensors are copied only once; protobuf would copy them several
    times.

    ``lease``: the shared memory of the large tensors; None: the message contains all tensors.
    """
    return _parts_of(request, service_pb2.ModelInferRequest(id=request.request_id), lease)


def stream_request_parts(request: InferenceRequest) -> list[Buffer]:
    """Serializes a ModelInferRequest that asks Triton to mark the last response. Otherwise a stream would never end."""
    message = service_pb2.ModelInferRequest(id=request.request_id)
    message.parameters[EMPTY_FINAL_RESPONSE].bool_param = True
    return _parts_of(request, message, None)


def trace_metadata(request: InferenceRequest) -> tuple[tuple[str, str], ...]:
    """Returns gRPC metadata that makes Triton's spans children of the caller's span.

    Only for a sampled trace: Triton 2.51 records every request that has a parent, and ignores the sampled flag.
    """
    trace = request.trace
    if trace is None or not trace.is_sampled:
        return ()
    state = (("tracestate", trace.state),) if trace.state else ()
    return ((TRACEPARENT, trace.traceparent), *state)


class _Head(Struct):
    """A response without its id and the bytes of its tensors, and what that means."""

    message: service_pb2.ModelInferResponse
    outputs: "tuple[_Output, ...]"
    is_final: bool
    version: str
    misses: int = 0
    """Responses with other heads."""


class _Output(NamedTuple):
    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int
    """The number of its bytes, or of its elements if these are of BYTES."""


LEARNS_AFTER = 16
"""After this many responses with other heads, the next head is learned."""


class RepeatedHeads:
    """Decodes responses, most of which differ from an earlier one of their model only in the bytes of their tensors.

    Comparing them saves a fifth of the decoding, 1.5 us.
    """

    def __init__(self) -> None:
        self._heads: dict[str, _Head] = {}

    def response_of(
        self, model: str, message: service_pb2.ModelInferResponse, *, streamed: bool = False
    ) -> InferenceResponse:
        """Like :func:`response_of` and :func:`streamed_response_of`. Removes the id and the tensors of ``message``."""
        raw_contents = message.raw_output_contents[:]
        message.ClearField("raw_output_contents")
        message.ClearField("id")
        head = self._heads.get(model)
        if head is None or head.message != message:
            head = self._learned(model, head, message)
        return InferenceResponse(_tensors_of(head.outputs, raw_contents), head.is_final or not streamed, head.version)

    def _learned(self, model: str, known: _Head | None, message: service_pb2.ModelInferResponse) -> _Head:
        head = _Head(message, _outputs_of(message), _is_final(message), message.model_version)
        if known is not None and known.misses < LEARNS_AFTER:
            known.misses += 1
            return head
        head.message = service_pb2.ModelInferResponse()
        head.message.CopyFrom(message)  # without the memory of the tensors
        self._heads[model] = head
        return head


def response_of(message: service_pb2.ModelInferResponse, lease: Lease | None = None) -> InferenceResponse:
    """Decodes the response of a unary call. Raises UpstreamProtocol if a tensor's bytes do not match its shape."""
    raw_contents = message.raw_output_contents[:]
    if lease is not None and len(raw_contents) == len(message.outputs):
        pairs = zip(message.outputs, raw_contents, strict=True)
        raw_contents = [raw or _shared_raw_of(output, lease) for output, raw in pairs]
    return InferenceResponse(_tensors_of(_outputs_of(message), raw_contents), version=message.model_version)


def streamed_response_of(message: service_pb2.ModelInferResponse) -> InferenceResponse:
    """Decodes one response of a stream, with a mark on the last response. Raises UpstreamProtocol."""
    tensors = _tensors_of(_outputs_of(message), message.raw_output_contents[:])
    return InferenceResponse(tensors, _is_final(message), message.model_version)


def _outputs_of(message: service_pb2.ModelInferResponse) -> tuple[_Output, ...]:
    """Raises UpstreamProtocol for an unknown datatype or an impossible shape."""
    outputs = []
    for output in message.outputs[:]:
        dtype, shape = DTYPE_BY_DATATYPE.get(output.datatype), tuple(output.shape[:])
        if dtype is None:
            raise UpstreamProtocol(f"Output '{_short(output.name)}' has a datatype that this gateway does not know.")
        if not _is_possible(shape):
            raise _unfitting(output.name, shape)
        size = math.prod(shape) * (1 if dtype.kind == "O" else dtype.itemsize)
        outputs.append(_Output(output.name, output.datatype, dtype, shape, size))
    return tuple(outputs)


def _tensors_of(outputs: tuple[_Output, ...], raw_contents: list[bytes]) -> dict[str, Tensor]:
    """Raises UpstreamProtocol."""
    if len(raw_contents) != len(outputs):
        raise UpstreamProtocol("Triton answered tensors without their raw contents.")
    tensors = {}
    for (name, datatype, dtype, shape, size), raw in zip(outputs, raw_contents):  # noqa: B905 - of equal length
        if datatype == BYTES:
            elements, is_whole = elements_in(raw)
            if not is_whole or len(elements) != size:
                raise _unfitting(name, shape)
            tensors[name] = Tensor(name, datatype, bytes_array(elements, shape))
        elif len(raw) == size:
            tensors[name] = Tensor(name, datatype, np.ndarray(shape, dtype, raw))
        else:
            raise _unfitting(name, shape)
    return tensors


def _unfitting(name: str, shape: tuple[int, ...]) -> UpstreamProtocol:
    return UpstreamProtocol(f"The bytes of output '{_short(name)}' do not fit its shape {_short(shape)}.")


def _shared_raw_of(output: service_pb2.ModelInferResponse.InferOutputTensor, lease: Lease) -> bytes:
    """Returns the output's bytes in shared memory; empty if the output is not there."""
    dtype = DTYPE_BY_DATATYPE.get(output.datatype)
    if dtype is None or dtype.kind == "O" or not _is_possible(tuple(output.shape)):
        return b""
    return lease.output(output.name, math.prod(output.shape) * dtype.itemsize) or b""


def _is_final(message: service_pb2.ModelInferResponse) -> bool:
    return FINAL_RESPONSE in message.parameters and message.parameters[FINAL_RESPONSE].bool_param


def _set_parameter(slot: service_pb2.InferParameter, value: Parameter) -> None:
    if isinstance(value, bool):
        slot.bool_param = value
    elif isinstance(value, int):
        slot.int64_param = value if value < 2**63 else value - 2**64  # only a sequence id, which Triton reads unsigned
    elif isinstance(value, float):
        slot.double_param = value
    else:
        slot.string_param = value


def _parts_of(request: InferenceRequest, message: service_pb2.ModelInferRequest, lease: Lease | None) -> list[Buffer]:
    for name, value in request.parameters.items():
        _set_parameter(message.parameters[name], value)
    if request.takes_traceparent and request.trace is not None:
        message.parameters[TRACEPARENT].string_param = request.trace.traceparent
    inputs = tuple([(tensor.name, tensor.datatype, tensor.array.shape) for tensor in request.inputs])
    slots = () if lease is None else lease.inputs
    signature = _signature_part(request.model, request.version, inputs, slots, _requested_outputs(request, lease))
    parts: list[Buffer] = [signature, message.SerializeToString()]
    for tensor, slot in zip_longest(request.inputs, slots):
        if slot is None:
            raw = raw_parts(tensor)
            parts += (_raw_input_head(sum(map(len, raw))), *raw)
    return parts


def _requested_outputs(request: InferenceRequest, lease: Lease | None) -> tuple[_RequestedOutput, ...]:
    """Returns the requested outputs. Empty: Triton sends all outputs over the wire."""
    if request.outputs:
        slots = {} if lease is None else dict(lease.outputs)
        return tuple([(output.name, slots.get(output.name), output.classification) for output in request.outputs])
    return () if lease is None else tuple([(name, slot, 0) for name, slot in lease.outputs])


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


def _is_possible(shape: tuple[int, ...]) -> bool:
    """Returns False for a shape that numpy does not support, or whose empty lists would fill the memory: [2**40, 0]."""
    smallest = min(shape, default=1)
    if len(shape) > _MAX_DIMENSIONS or smallest < 0:
        return False
    return smallest > 0 or math.prod(filter(None, shape)) <= _MAX_EMPTY_LISTS


def _short(value: object) -> str:
    """Returns at most 128 characters of a name or a shape."""
    return str(list(value) if isinstance(value, tuple) else value)[:128]


def document_request(document: Document, model: str, version: str) -> Any:
    if document == "metadata":
        return service_pb2.ModelMetadataRequest(name=model, version=version)
    if document == "config":
        return service_pb2.ModelConfigRequest(name=model, version=version)
    return service_pb2.ModelStatisticsRequest(name=model, version=version)


def document_of(reply: Any) -> dict[str, Any]:
    """Converts ``reply``, the response to :func:`document_request`, to the JSON of Triton's HTTP endpoint.

    The JSON converter of protobuf is not suitable: it writes 64-bit integers as strings and omits default values.
    """
    return _object_of(reply.config if isinstance(reply, service_pb2.ModelConfigResponse) else reply)


def _object_of(message: Message) -> dict[str, Any]:
    return {
        field.name: _value_of(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value_of(value: Any, field: Any) -> Any:
    """``field``: the descriptor of the value's field."""
    if isinstance(value, Mapping):
        of_value = field.message_type.fields_by_name["value"]
        return {str(key): _plain(value[key], of_value) for key in value}
    if field.is_repeated:
        return [_plain(each, field) for each in value]
    return _plain(value, field)


def _plain(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _object_of(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
