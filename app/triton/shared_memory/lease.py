"""The regions of one call, and the locations of its tensors in them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from app.domain.inference import InferenceRequest
from app.domain.tensor import BYTES, Tensor
from app.triton.shared_memory.layout import Layout, Span
from app.triton.shared_memory.region import Region
from app.triton.transport import RpcError

_ANSWERS = {"ALREADY_EXISTS", "INVALID_ARGUMENT", "NOT_FOUND"}
"""Codes that gRPC never generates itself. They prove that Triton has ended the call."""


OnEnd = Callable[[Region | None, Sequence[Region], bool], None]
"""Called with the call's own region, all its regions, and whether Triton has certainly ended the call."""


class Slot(NamedTuple):
    """A part of a region, in bytes, with the name under which Triton knows the region."""

    region: str
    offset: int
    size: int


class Lease:
    """A context manager around a call.

    ``own``: the region taken for the call. ``bodies``: position of an input -> the region of the body that contains it.
    """

    def __init__(self, layout: Layout, own: Region | None, bodies: Mapping[int, Region], on_end: OnEnd) -> None:
        self.inputs = tuple(_slot(bodies.get(each, own), span) for each, span in enumerate(layout.inputs))
        """A slot for each input of the request; None for an input that is sent over the wire."""
        self.outputs = tuple((name, _slot(own, span)) for name, span in layout.outputs)
        """All outputs of the model; empty if all of them are sent over the wire."""
        self.regions = (*bodies.values(), *((own,) if own else ()))
        self._own = own
        self._in_place = frozenset(bodies)
        self._on_end = on_end
        self._is_settled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        is_answer = isinstance(exc, RpcError) and exc.code in _ANSWERS
        self._on_end(self._own, self.regions, self._is_settled or is_answer)

    def fill(self, request: InferenceRequest) -> None:
        """Copies the large inputs into the call's region, except inputs that are already in a body's region."""
        for position, (tensor, slot) in enumerate(zip(request.inputs, self.inputs, strict=True)):
            if self._own is not None and slot is not None and position not in self._in_place:
                _write(tensor, self._own.view, slot.offset)

    def settle(self) -> None:
        """Call this when Triton has answered the call and sends nothing more for it."""
        self._is_settled = True

    def output(self, name: str, size: int) -> bytes | None:
        """Returns a copy of the output; None for an output without a slot of that size."""
        slot = dict(self.outputs).get(name)
        if self._own is None or slot is None or size > slot.size:
            return None
        return bytes(self._own.view[slot.offset : slot.offset + size])


def _slot(region: Region | None, span: Span | None) -> Slot | None:
    return None if region is None or span is None else Slot(region.name, *span)


def _write(tensor: Tensor, view: memoryview, start: int) -> None:
    """Writes the raw form of a tensor."""
    array = tensor.array
    if tensor.datatype != BYTES:
        np.copyto(np.ndarray(array.shape, array.dtype, view, start), array)
        return
    for element in array.flat:
        view[start : start + 4] = len(element).to_bytes(4, "little")
        start += 4 + len(element)
        view[start - len(element) : start] = element
