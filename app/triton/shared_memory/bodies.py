"""Bodies of requests that are received into regions, so that the tensor lies in its place before the call.

Only free regions are used, and at most half of the lane's limit: a slow client holds its region as long as it sends.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from app.domain.tensor import BYTES, Tensor
from app.triton.shared_memory.layout import ALIGNMENT
from app.triton.shared_memory.pool import Pool
from app.triton.shared_memory.region import Region

_PREFIX_BYTES = 4
"""The length before an element of BYTES. Source: Open Inference Protocol, "Tensor Data"."""
_START = ALIGNMENT + _PREFIX_BYTES
"""Where a body begins in its region, so that its tensor is aligned."""


class Bodies:
    """Implements :class:`app.domain.tensor_memory.TensorMemory`. ``limit``: bytes of their regions together.

    ``on_change`` is called when a region is taken or given back.
    """

    def __init__(self, pool: Pool, limit: int, large_bytes: int, on_change: Callable[[], None]) -> None:
        self._pool = pool
        self._limit = limit
        self._large_bytes = large_bytes
        self._on_change = on_change
        self._regions: dict[int, Region] = {}
        """The address of a body's tensor -> its region."""

    def take(self, size: int) -> memoryview | None:
        held = sum(region.size for region in self._regions.values())
        region = self._pool.take(_START + size, self._limit - held) if size >= self._large_bytes else None
        if region is None:
            return None
        view = region.view
        view[ALIGNMENT:_START] = size.to_bytes(_PREFIX_BYTES, "little")
        body = view[_START : _START + size]
        self._regions[_address_of(body)] = region
        self._on_change()
        return body

    def give_back(self, memory: memoryview) -> None:
        self._pool.give_back(self._regions.pop(_address_of(memory)))
        self._on_change()

    def regions_of(self, tensors: Sequence[Tensor]) -> Mapping[int, Region]:
        """Position of a tensor -> the region in which it lies in its raw form, from ALIGNMENT on."""
        if not self._regions:
            return {}
        found = enumerate(map(self._region_of, tensors))
        return {position: region for position, region in found if region is not None}

    def _region_of(self, tensor: Tensor) -> Region | None:
        if tensor.datatype != BYTES or tensor.array.size != 1:
            return None
        element = tensor.array.flat[0]
        region = self._regions.get(_address_of(element)) if isinstance(element, memoryview) else None
        return region if region is not None and _prefix_in(region) == len(element) else None


def _prefix_in(region: Region) -> int:
    return int.from_bytes(region.view[ALIGNMENT:_START], "little")


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
