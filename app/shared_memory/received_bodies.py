"""Receives request bodies directly into regions, so that their tensors need no copy before the call.

Only free regions are used, and at most half of the limit, because a slow client occupies its region while it sends.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from app.core.inference import BYTES, ELEMENT, Tensor
from app.shared_memory.layout import ALIGNMENT, LARGE_BYTES
from app.shared_memory.regions import Region, RegionPool


class BodyLocation(NamedTuple):
    """The location of a tensor in its raw form."""

    region: Region
    offset: int


class _Body(NamedTuple):
    region: Region
    base: int
    """The address of the region."""
    size: int


class Bodies:
    """Implements :class:`app.core.inference.TensorMemory`. ``limit``: total bytes of the regions.

    ``on_change`` is called when a region is taken or returned.
    """

    def __init__(self, pool: RegionPool, limit: int, on_change: Callable[[], None]) -> None:
        self._pool = pool
        self._limit = limit
        self._on_change = on_change
        self._bodies: dict[int, _Body] = {}
        """By the address of the first byte."""

    def take(self, size: int, tensor_at: int) -> memoryview | None:
        start = ALIGNMENT + -tensor_at % ALIGNMENT
        held = sum(body.region.size for body in self._bodies.values())
        region = self._pool.take(start + size, self._limit - held) if size >= LARGE_BYTES else None
        if region is None:
            return None
        view = region.view
        if tensor_at == ELEMENT:
            view[start + ELEMENT : start] = _length(size)
        body = view[start : start + size]
        self._bodies[_address_of(body)] = _Body(region, _address_of(view), size)
        self._on_change()
        return body

    def give_back(self, memory: memoryview) -> None:
        self._pool.give_back(self._bodies.pop(_address_of(memory)).region)
        self._on_change()

    def places_of(self, tensors: Sequence[Tensor]) -> Mapping[int, BodyLocation]:
        """Returns the position of each large tensor that is in a body in its raw form -> its location."""
        if not self._bodies:
            return {}
        found = enumerate(map(self._place_of, tensors))
        return {position: place for position, place in found if place is not None}

    def _place_of(self, tensor: Tensor) -> BodyLocation | None:
        array = tensor.array
        if tensor.datatype != BYTES:
            address = array.__array_interface__["data"][0]
            found = self._found(address, array.nbytes) if array.flags.c_contiguous else None
            return found if found is not None and found.offset % ALIGNMENT == 0 else None
        # a tensor with one element, which follows its length
        element = array.flat[0] if array.size == 1 else None
        if not isinstance(element, memoryview) or not element:
            return None
        found = self._found(_address_of(element), len(element))
        if found is None:
            return None
        start = found.offset + ELEMENT
        has_length = found.region.view[start : found.offset] == _length(len(element))
        return BodyLocation(found.region, start) if has_length else None

    def _found(self, address: int, size: int) -> BodyLocation | None:
        if size < LARGE_BYTES:
            return None
        for first, body in self._bodies.items():
            if first <= address and address + size <= first + body.size:
                return BodyLocation(body.region, address - body.base)
        return None


def _length(size: int) -> bytes:
    return size.to_bytes(-ELEMENT, "little")


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
