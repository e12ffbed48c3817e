"""Decodes responses that differ from an earlier response of the same model only in the bytes of their tensors.

Protobuf writes the fields of a message in the order of their numbers, so the names, datatypes and shapes of the outputs
precede their bytes. This part of a response is its head. A known head is decoded once, and compared afterwards. This
saves a tenth of the CPU of a streamed event (docs/benchmarks/README.md).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from msgspec import Struct
from tritonclient.grpc import service_pb2

from app.core.inference import BYTES, DTYPE_BY_DATATYPE, Array, InferenceResponse, Tensor
from app.triton.codec import array_of

_FIELDS = service_pb2.ModelInferResponse.DESCRIPTOR.fields_by_name
_RAW_OUTPUT = _FIELDS["raw_output_contents"].number << 3 | 2
"""The tag of one element: the number of the field, and the wire type for bytes."""
_ID = _FIELDS["id"].number << 3 | 2
_INFER_RESPONSE = bytes(
    (service_pb2.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2,)
)
LEARNS_AFTER = 16
"""After this many responses with other heads, the next head is learned. Learning costs as much as five responses."""
MAX_LEARNED_BYTES = 64 * 1024
"""No head is learned from a larger response, because its tensors would be copied."""


class Output(Struct, frozen=True):
    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int | None
    """The number of its bytes; None for BYTES."""


class Head(Struct, frozen=True):
    """The bytes before and after the request's id, and their meaning."""

    before: bytes
    id_bytes: int
    after: bytes
    outputs: tuple[Output, ...]
    is_final: bool
    version: str

    def response_of(self, answer: bytes, start: int) -> InferenceResponse | None:
        """Decodes the ModelInferResponse that begins at ``start``. Returns None if its head is a different one."""
        if not answer.startswith(self.before, start):
            return None
        at = start + len(self.before) + self.id_bytes
        if not answer.startswith(self.after, at):
            return None
        at += len(self.after)
        end, outputs = len(answer), {}
        for output in self.outputs:
            if at + 1 >= end or answer[at] != _RAW_OUTPUT:
                return None
            size, at = (answer[at + 1], at + 2) if answer[at + 1] < 0x80 else _varint(answer, at + 1)
            raw = answer[at : at + size]
            at += size
            if len(raw) == output.size:
                array: Array | None = np.ndarray(output.shape, output.dtype, raw)
            else:
                array = array_of(raw, output.dtype, output.shape)
            if array is None:
                return None
            outputs[output.name] = Tensor(output.name, output.datatype, array)
        return InferenceResponse(outputs, self.is_final, self.version) if at == end else None


class RepeatedHeads:
    """The last learned head of each model: either of unary calls, or of streams, whose last response is marked."""

    def __init__(self) -> None:
        self._heads: dict[str, Head] = {}
        self._misses: dict[str, int] = {}

    def response_of(self, model: str, answer: bytes) -> InferenceResponse | None:
        """Decodes a ModelInferResponse with the known head; None for another head or a malformed message."""
        head = self._heads.get(model)
        return None if head is None else head.response_of(answer, 0)

    def streamed_response_of(self, model: str, answer: bytes) -> InferenceResponse | None:
        """Decodes a ModelStreamInferResponse without an error; None for another head or a malformed message."""
        head = self._heads.get(model)
        if head is None or not answer.startswith(_INFER_RESPONSE):
            return None
        size, start = _varint(answer, 1)
        return head.response_of(answer, start) if start + size == len(answer) else None

    def learn(
        self, model: str, answer: bytes, message: service_pb2.ModelInferResponse, response: InferenceResponse
    ) -> None:
        """Call this with a response that was decoded without a known head. Most calls are no-ops."""
        if len(answer) > MAX_LEARNED_BYTES:
            return
        misses = self._misses.get(model, LEARNS_AFTER) + 1
        self._misses[model] = misses
        if misses > LEARNS_AFTER:
            self._misses[model] = 0
            head = _head_of(answer, message, response)
            if head is not None:
                self._heads[model] = head


def _head_of(answer: bytes, message: service_pb2.ModelInferResponse, response: InferenceResponse) -> Head | None:
    """Returns None if the bytes of the outputs are not at the end, or if the message has no id."""
    tensors = _encoded(message.raw_output_contents)
    start = len(answer) - message.ByteSize()
    head = answer[start : len(answer) - len(tensors)]
    request_id = message.id.encode()
    before, mark, after = head.partition(bytes((_ID, len(request_id) & 0x7F)) + request_id)
    found = Head(
        before + mark[:2],
        len(request_id),
        after,
        tuple(map(_output_of, message.outputs)),
        response.is_final,
        response.version,
    )
    return found if mark and answer.endswith(tensors) and _is_sound(found, message) else None


def _output_of(output: service_pb2.ModelInferResponse.InferOutputTensor) -> Output:
    dtype, shape = DTYPE_BY_DATATYPE[output.datatype], tuple(output.shape)
    size = None if output.datatype == BYTES else math.prod(shape) * dtype.itemsize
    return Output(output.name, output.datatype, dtype, shape, size)


def _is_sound(head: Head, message: service_pb2.ModelInferResponse) -> bool:
    """Whether the bytes of the head are a message that has any id, and otherwise equals ``message`` without tensors."""
    expected = service_pb2.ModelInferResponse()
    expected.CopyFrom(message)
    expected.ClearField("raw_output_contents")
    for request_id in (message.id, "x" * head.id_bytes):
        expected.id = request_id
        try:
            decoded = service_pb2.ModelInferResponse.FromString(head.before + request_id.encode() + head.after)
        except DecodeError:
            return False
        if decoded != expected:
            return False
    return True


def _encoded(contents: Sequence[bytes]) -> bytes:
    return service_pb2.ModelInferResponse(raw_output_contents=contents).SerializeToString()  # type: ignore[no-any-return]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an integer and the position after it; -1 and the length of the data if the integer is malformed."""
    size = shift = 0
    for position in range(at, min(at + 5, len(data))):
        size |= (data[position] & 0x7F) << shift
        if data[position] < 0x80:
            return size, position + 1
        shift += 7
    return -1, len(data)
