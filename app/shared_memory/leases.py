"""Transfers large tensors through shared memory, with the wire as the fallback.

If no free region is large enough, a new region is created, registered with Triton and kept for later calls. After a
call that Triton answered, the region is free. After any other call Triton may still read or write the region, so it is
retired: it is never used again, but unregistered, and dropped when Triton no longer maps it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from app.core.aio import Backoff
from app.core.inference import BYTES, ELEMENT, Buffer, InferenceRequest, KeptMemory, Tensor, raw_parts
from app.shared_memory.regions import (
    ALIGNMENT,
    LARGE_BYTES,
    ByteRange,
    Layout,
    Layouts,
    Owner,
    Region,
    RegionPool,
    is_abandoned,
    remove_leftovers,
    rounded,
)


class RegistryFailed(OSError):
    """Triton did not answer in time, or refused."""


Ask = Callable[..., Awaitable[Any]]
"""Calls a method of Triton, given its name and the fields of its request. Raises :class:`RegistryFailed`."""


class BodyLocation(NamedTuple):
    """The location of a tensor in its raw form."""

    region: Region
    offset: int
    is_output: bool = False


class Bodies:
    """Implements :class:`app.core.inference.TensorMemory`. ``limit``: total bytes of the regions.

    Request bodies are received directly into regions, so that their tensors need no copy before the call. Only free
    regions are used, and at most half of the limit, because a slow client occupies its region while it sends.

    ``on_change`` is called when a region is taken or returned.
    """

    def __init__(self, pool: RegionPool, limit: int, on_change: Callable[[], None]) -> None:
        self._pool = pool
        self._limit = limit
        self._on_change = on_change
        self._bodies: dict[int, tuple[int, BodyLocation]] = {}
        """Address of the first byte -> the size, and where the body begins."""

    def take(self, size: int, tensor_at: int) -> memoryview | None:
        start = ALIGNMENT + -tensor_at % ALIGNMENT
        held = sum(place.region.size for _, place in self._bodies.values() if not place.is_output)
        region = self._pool.take(start + size, self._limit - held) if size >= LARGE_BYTES else None
        if region is None:
            return None
        view = region.view
        if tensor_at == ELEMENT:
            view[start + ELEMENT : start] = _length(size)
        body = view[start : start + size]
        self._bodies[_address_of(body)] = size, BodyLocation(region, start)
        self._on_change()
        return body

    def give_back(self, memory: memoryview) -> None:
        _, place = self._bodies.pop(_address_of(memory))
        if not place.is_output or all(other.region is not place.region for _, other in self._bodies.values()):
            self._pool.give_back(place.region)
        self._on_change()

    def keep(self, outputs: Sequence[tuple[memoryview, BodyLocation]], kept: KeptMemory) -> None:
        """Treats the outputs of a call like bodies."""
        for memory, place in outputs:
            self._bodies[_address_of(memory)] = len(memory), place
            kept.releases.append(partial(self.give_back, memory))

    def places_of(self, tensors: Sequence[Tensor]) -> Mapping[int, BodyLocation]:
        """Returns the position of each large tensor that is in a body in its raw form -> its location."""
        places = {}
        for position, tensor in enumerate(tensors) if self._bodies else ():
            array = tensor.array
            if tensor.datatype == BYTES:  # one element, which follows its length
                element = array.flat[0] if array.size == 1 else None
                if not isinstance(element, memoryview) or not element:
                    continue
                address, size = _address_of(element), len(element)
            else:
                address, size = array.__array_interface__["data"][0], array.nbytes * array.flags.c_contiguous
            for first, (length, body) in self._bodies.items() if size >= LARGE_BYTES else ():
                if first <= address and address + size <= first + length:
                    offset = body.offset + address - first
                    if tensor.datatype == BYTES:
                        is_raw = body.region.view[offset + ELEMENT : offset] == _length(size)
                        offset += ELEMENT
                    else:
                        is_raw = offset % ALIGNMENT == 0
                    if is_raw:
                        places[position] = BodyLocation(body.region, offset)
        return places


def _length(size: int) -> bytes:
    return size.to_bytes(-ELEMENT, "little")


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class TensorSlot(NamedTuple):
    """A part of a region, in bytes, with the name under which Triton knows the region."""

    region: str
    offset: int
    size: int


class Lease(AbstractContextManager["Lease"]):
    """The regions of one call, and the locations of its tensors in them; a context manager around the call.

    ``own``: the region taken for the call. ``bodies``: position of an input -> where it is in a body's region.
    """

    def __init__(
        self, layout: Layout, own: Region | None, bodies: Mapping[int, BodyLocation], on_end: Callable[["Lease"], None]
    ) -> None:
        regions = {each: place.region for each, place in bodies.items()}
        self.inputs = tuple(_slot(regions.get(each, own), span) for each, span in enumerate(layout.inputs))
        """A slot for each input of the request; None for an input that is sent over the wire."""
        self.outputs = tuple((name, _slot(own, span)) for name, span in layout.outputs)
        """All outputs of the model; empty if all of them are sent over the wire."""
        self.regions = (*regions.values(), *((own,) if own else ()))
        self.own = own
        self.is_settled = False
        """Set this when Triton has certainly ended the call."""
        self.kept: KeptMemory | None = None
        """Set this if the outputs stay in the region until it is released."""
        self.kept_outputs: list[tuple[memoryview, BodyLocation]] = []
        """The outputs that stay in the region, and where each is."""
        self._in_place = frozenset(bodies)
        self._on_end = on_end

    def __exit__(self, *_exc: object) -> None:
        self._on_end(self)

    def fill(self, request: InferenceRequest) -> None:
        """Copies the large inputs into the call's region, except inputs that are already in a body's region."""
        for position, (tensor, slot) in enumerate(zip(request.inputs, self.inputs, strict=True)):
            if self.own is None or slot is None or position in self._in_place:
                continue
            view, start, array = self.own.view, slot.offset, tensor.array
            if tensor.datatype != BYTES:
                np.copyto(np.ndarray(array.shape, array.dtype, view, start), array)
                continue
            for part in raw_parts(tensor):
                view[start : start + len(part)] = part
                start += len(part)

    def output(self, name: str, size: int) -> Buffer | None:
        """Returns a copy of the output, or the output itself if it is kept; None without a slot of that size."""
        slot = dict(self.outputs).get(name)
        if self.own is None or slot is None or size > slot.size:
            return None
        view = self.own.view[slot.offset : slot.offset + size]
        if self.kept is None:
            return bytes(view)
        self.kept_outputs.append((view, BodyLocation(self.own, slot.offset, is_output=True)))
        return view


def _slot(region: Region | None, span: ByteRange | None) -> TensorSlot | None:
    return None if region is None or span is None else TensorSlot(region.name, *span)


Way = Literal["shared_memory", "full", "unavailable", "lost"]
"""How a call with a large tensor was sent. All values but the first mean: over the wire."""

IDLE_S = 60.0
"""A region that was idle for this time is returned to the system."""
_FIRST_LOOK_S = 0.05
_LONGEST_LOOK_S = 5.0
_LOST = "Unable to find shared memory region"
_COUNTS_USES = (2, 50)
"""From this version on Triton does not unmap regions that a request uses. Older versions do, and crash."""
_log = logging.getLogger(__name__)


class SharedMemory:
    """Leases regions to calls.

    ``limit``: total bytes of all regions. ``max_call_bytes``: limit of one call. ``called``: called when a call with a
    large tensor starts. ``holds``: called with the bytes of all regions after each change.
    """

    def __init__(
        self,
        ask: Ask,
        limit: int,
        max_call_bytes: int,
        called: Callable[[Way], None] = lambda way: None,
        holds: Callable[..., None] = lambda **sizes: None,
    ) -> None:
        self._ask = ask
        self._pool = RegionPool(limit)
        self._owner = Owner()
        self._layouts = Layouts(max_call_bytes)
        self.learn = self._layouts.learn
        """Stores a model's configuration. The tensors of unknown models are sent over the wire."""
        self.bodies = Bodies(self._pool, limit // 2, self._tell)
        self._called = called
        self._holds = holds
        self._backoff = Backoff()
        self._is_proven = False
        """Whether Triton has mapped a region before, which proves that both use the same ``/dev/shm``."""
        self._counts_uses: bool | None = None
        """Whether this Triton unregisters regions safely; None: not queried since Triton started."""
        self._has_work = asyncio.Event()

    async def lease(self, request: InferenceRequest) -> Lease | None:
        """Returns regions for the large tensors of the request; None if they must be sent over the wire."""
        places = self.bodies.places_of(request.inputs)
        layout = self._layouts.layout_of(request, {position: place.offset for position, place in places.items()})
        if layout is None:
            return None
        own = None
        if layout.size:
            own = self._pool.take(layout.size) or await self._made(rounded(layout.size))
            if own is None:
                return None
        self._called("shared_memory")
        self._tell()
        lease = Lease(layout, own, places, self._ended)
        lease.kept = next((each for each in request.extensions if isinstance(each, KeptMemory)), None)
        return lease

    def is_lost(self, lease: Lease, message: str) -> bool:
        """Whether Triton rejected the call, before it ran the model, because the region is not registered.

        This happens after a restart of Triton, so the other regions are lost too.
        """
        lost = [region for region in lease.regions if region.name in message]
        if _LOST not in message or not lost:
            return False
        if lost[0] not in self._pool.those("retired"):
            self._counts_uses = None
            self._pool.retire(*self._pool.those("free", "used"))
            self._has_work.set()
        self._called("lost")
        return True

    async def run(self) -> None:
        """Removes the files of killed gateways, then drops the regions that Triton no longer maps, until cancelled."""
        with suppress(OSError):
            remove_leftovers()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._has_work.wait()
            self._has_work.clear()
            if self._counts_uses:
                self._pool.retire_free(time.monotonic() - IDLE_S)
            look_s = _FIRST_LOOK_S
            while not await self._cleaned():
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)

    async def close(self) -> None:
        """Releases all regions. Call this when no call is running."""
        if self._counts_uses:
            self._pool.retire_free()
            await self._cleaned()
        self._owner.release()

    def _ended(self, lease: Lease) -> None:
        """Frees or retires the regions of a call. Regions of bodies are returned later."""
        if not lease.is_settled:
            self._pool.retire(*lease.regions)
            self._has_work.set()
        elif lease.kept is not None and lease.kept_outputs:
            self.bodies.keep(lease.kept_outputs, lease.kept)
        elif lease.own is not None:
            self._pool.give_back(lease.own)
        self._tell()

    async def _made(self, size: int) -> Region | None:
        """Creates and registers a region for a call, already in use. None: the call must use the wire."""
        if not self._backoff.is_due:
            self._called("unavailable")
            return None
        if not self._pool.has_room(size):
            if self._counts_uses:  # retires free regions, because they are too small
                self._pool.retire_free()
                self._has_work.set()
            self._called("full")
            return None
        region = None
        try:
            region = Region(self._owner.next_name(), size)
            self._pool.add(region)
            region.allocate()
            await self._may_unregister()
            await self._ask("SystemSharedMemoryRegister", name=region.name, key=f"/{region.name}", byte_size=size)
        except BaseException as exc:
            if region is not None:
                self._pool.drop(region)
            if not isinstance(exc, OSError):
                raise
            if not self._backoff.failures:
                _log.warning("no shared memory for large tensors, which are sent over the wire: %s", exc)
            self._backoff.fail()
            self._called("unavailable")
            return None
        finally:
            if region is not None:
                region.unlink()
        if self._backoff.failures or not self._is_proven:
            self._is_proven = True
            self._backoff.reset()
            self._has_work.set()
            _log.info("large tensors are sent through shared memory")
        return region

    def _tell(self) -> None:
        free, used, retired = self._pool.sizes
        self._holds(free=free, used=used, quarantined=retired)

    async def _cleaned(self) -> bool:
        """Makes Triton unmap unneeded regions. Returns False if another check is needed.

        Unneeded are those that are retired, are left from a failed registration, or belong to a gateway that was
        killed.
        """
        retired, owner = self._pool.those("retired"), self._owner
        try:
            if self._is_proven:
                remove_leftovers()
                if await self._may_unregister():
                    for name in (await self._ask("SystemSharedMemoryStatus")).regions:
                        kept = {region.name for region in self._pool.those("free", "used")}
                        if name not in kept if owner.owns(name) else is_abandoned(name):
                            # While a request uses the region, Triton 2.50 and 2.51 refuse; newer ones unmap it later.
                            with suppress(RegistryFailed):
                                await self._ask("SystemSharedMemoryUnregister", name=name)
                names = (await self._ask("SystemSharedMemoryStatus")).regions
                for region in retired:
                    if region.name not in names:
                        self._pool.drop(region)
        except OSError as exc:
            _log.debug("Triton's regions could not be listed: %s", exc)
            return False
        self._tell()
        return not self._pool.those("retired")

    async def _may_unregister(self) -> bool:
        if self._counts_uses is None:
            found = re.match(r"(\d+)\.(\d+)", (await self._ask("ServerMetadata")).version)
            self._counts_uses = found is not None and (int(found[1]), int(found[2])) >= _COUNTS_USES
        return self._counts_uses
