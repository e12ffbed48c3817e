"""The region of one call, and where the call's tensors lie in it."""

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

from app.domain.inference import InferenceRequest
from app.domain.tensor import BYTES, Tensor
from app.triton.shared_memory.layout import Layout, Span
from app.triton.shared_memory.region import Region
from app.triton.transport import RpcError

_ANSWERS = {"ALREADY_EXISTS", "INVALID_ARGUMENT", "NOT_FOUND"}
"""Codes that gRPC never makes itself: Triton has ended the call."""


class Slot(NamedTuple):
    """A part of a region, in bytes, as Triton is told of it."""

    region: str
    offset: int
    size: int


class Lease:
    """A context manager around a call. ``on_end`` is told whether Triton has surely ended the call."""

    def __init__(self, region: Region, layout: Layout, on_end: Callable[[bool], None]) -> None:
        self.inputs = tuple(_slot(region, span) for span in layout.inputs)
        """One for each input of the request; None for an input that travels over the wire."""
        self.outputs = tuple((name, _slot(region, span)) for name, span in layout.outputs)
        """All outputs of the model, or none if all of them travel over the wire."""
        self.region = region
        self._on_end = on_end
        self._is_settled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        is_answer = isinstance(exc, RpcError) and exc.code in _ANSWERS
        self._on_end(self._is_settled or is_answer)

    def fill(self, request: InferenceRequest) -> None:
        """Copies the large inputs into the region, each once."""
        for tensor, slot in zip(request.inputs, self.inputs, strict=True):
            if slot is not None:
                _write(tensor, self.region.view, slot.offset)

    def settle(self) -> None:
        """Triton has answered the call, and sends nothing more for it."""
        self._is_settled = True

    def output(self, name: str, size: int) -> bytes | None:
        """A copy of what Triton wrote; None for an output that has no room of that size in the region."""
        slot = dict(self.outputs).get(name)
        if slot is None or size > slot.size:
            return None
        return bytes(self.region.view[slot.offset : slot.offset + size])


def _slot(region: Region, span: Span | None) -> Slot | None:
    return None if span is None else Slot(region.name, *span)


def _write(tensor: Tensor, view: memoryview, start: int) -> None:
    """Writes the tensor's raw form."""
    array = tensor.array
    if tensor.datatype != BYTES:
        np.copyto(np.ndarray(array.shape, array.dtype, view, start), array)
        return
    for element in array.flat:
        view[start : start + 4] = len(element).to_bytes(4, "little")
        start += 4 + len(element)
        view[start - len(element) : start] = element
