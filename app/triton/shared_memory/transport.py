"""Transfers large tensors through shared memory, with the wire as the fallback.

If no free region is large enough, a new region is created, registered with Triton and kept for later calls. After a
call that Triton answered, the region is free. After any other call Triton may still read or write the region, so it is
retired: it is never used again, but unregistered, and dropped when Triton no longer maps it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from app.core.aio import Backoff
from app.core.inference import InferenceRequest
from app.core.model import ModelConfig
from app.grpc.rpc import RpcError, Transport
from app.triton.shared_memory.bodies import Bodies
from app.triton.shared_memory.layout import LARGE_BYTES, Layouts, Lease
from app.triton.shared_memory.regions import Owner, Region, RegionPool, is_abandoned, remove_leftovers, rounded
from app.triton.transport import call_control

_TIMEOUT_S = 1.0
_COUNTS_USES = (2, 50)
"""From this version on Triton does not unmap regions that a request uses. Older versions do, and crash."""


class Registry:
    """Triton's list of registered regions, over gRPC. Every method raises RpcError or DecodeError."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def counts_uses(self) -> bool:
        """Whether it is safe to unregister a region that may be in use."""
        answer = await call_control(self._transport, service_pb2.ServerMetadataRequest(), _TIMEOUT_S)
        found = re.match(r"(\d+)\.(\d+)", answer.version)
        return found is not None and (int(found[1]), int(found[2])) >= _COUNTS_USES

    async def register(self, region: Region) -> None:
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=region.name, key=f"/{region.name}", byte_size=region.size
        )
        await call_control(self._transport, request, _TIMEOUT_S)

    async def unregister(self, name: str) -> None:
        """Unregisters a region. While a request uses it, Triton 2.50 and 2.51 refuse; newer ones unmap it later."""
        await call_control(self._transport, service_pb2.SystemSharedMemoryUnregisterRequest(name=name), _TIMEOUT_S)

    async def names(self) -> set[str]:
        """The regions that Triton maps."""
        answer = await call_control(self._transport, service_pb2.SystemSharedMemoryStatusRequest(), _TIMEOUT_S)
        return set(answer.regions)


Way = Literal["shared_memory", "full", "unavailable", "lost"]
"""How a call with a large tensor was sent. All values but the first mean: over the wire."""

IDLE_S = 60.0
"""A region that was idle for this time is returned to the system."""
_FIRST_LOOK_S = 0.05
_LONGEST_LOOK_S = 5.0
_FAILURES = (OSError, RpcError, DecodeError)
_LOST = "Unable to find shared memory region"
_log = logging.getLogger(__name__)


class SharedMemoryObserver(Protocol):
    def called(self, way: Way) -> None:
        """Called when a call with a large tensor starts."""

    def holds(self, *, free: int, used: int, quarantined: int) -> None:
        """Called with the bytes of all regions after each change."""


class SharedMemoryTransport:
    """Leases regions to calls. ``limit``: total bytes of all regions. ``large_bytes``: smallest tensor that uses it."""

    def __init__(
        self,
        transport: Transport,
        limit: int,
        observer: SharedMemoryObserver,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        self._registry = Registry(transport)
        self._pool = RegionPool(limit)
        self._owner = Owner()
        self._layouts = Layouts(large_bytes)
        self.bodies = Bodies(self._pool, limit // 2, large_bytes, self._tell)
        self._observer = observer
        self._backoff = Backoff()
        self._is_proven = False
        """Whether Triton has mapped a region before, which proves that both use the same ``/dev/shm``."""
        self._is_failing = False
        self._counts_uses: bool | None = None
        """Whether this Triton unregisters regions safely; None: not queried since Triton started."""
        self._has_work = asyncio.Event()

    def learn(self, config: ModelConfig, version: str) -> None:
        """Stores a model's configuration. The tensors of unknown models are sent over the wire."""
        self._layouts.learn(config, version)

    async def lease(self, request: InferenceRequest) -> Lease | None:
        """Returns regions for the large tensors of the request; None if they must be sent over the wire."""
        places = self.bodies.places_of(request.inputs)
        layout = self._layouts.layout_of(request, {position: place.offset for position, place in places.items()})
        if layout is None:
            return None
        own = None
        if layout.size:
            own = self._pool.take(layout.size) or await self._made(layout.size)
            if own is None:
                return None
        self._observer.called("shared_memory")
        self._tell()
        bodies = {position: place.region for position, place in places.items()}
        return Lease(layout, own, bodies, self._ended)

    def is_lost(self, lease: Lease, message: str) -> bool:
        """Whether Triton rejected the call, before it ran the model, because the region is not registered.

        This happens after a restart of Triton, so the other regions are lost too.
        """
        lost = [region for region in lease.regions if region.name in message]
        if _LOST not in message or not lost:
            return False
        if lost[0] not in self._pool.retired:
            self._counts_uses = None
            self._pool.retire_all()
            self._look()
        self._observer.called("lost")
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
            self._pool.retire_free(time.monotonic())
            await self._cleaned()
        self._owner.release()

    def _ended(self, own: Region | None, regions: Sequence[Region], is_answered: bool) -> None:
        """Frees or retires the regions of a call. Regions of bodies (all but ``own``) are returned later."""
        if not is_answered:
            for region in regions:
                self._pool.retire(region)
            self._look()
        elif own is not None:
            self._pool.give_back(own)
        self._tell()

    async def _made(self, size: int) -> Region | None:
        """Creates a region for a call, already in use. None: the call must use the wire."""
        size = rounded(size)
        if not self._backoff.is_due:
            self._observer.called("unavailable")
        elif not self._pool.has_room(size):
            self._make_room()
            self._observer.called("full")
        else:
            try:
                return await self._registered(size)
            except _FAILURES as exc:
                self._failed(exc)
                self._observer.called("unavailable")
        return None

    def _make_room(self) -> None:
        """Retires free regions, because they are too small and the limit is reached."""
        if self._counts_uses:
            self._pool.retire_free(time.monotonic())
            self._look()

    async def _registered(self, size: int) -> Region:
        """Creates and registers a region. Raises OSError, RpcError or DecodeError."""
        region = Region(self._owner.next_name(), size)
        self._pool.add(region)
        try:
            region.allocate()
            await self._register(region)
        except BaseException:
            self._pool.drop(region)
            raise
        finally:
            region.unlink()
        return region

    async def _register(self, region: Region) -> None:
        await self._may_unregister()
        await self._registry.register(region)
        if self._is_failing or not self._is_proven:
            self._is_proven, self._is_failing = True, False
            self._backoff.reset()
            self._look()
            _log.info("large tensors are sent through shared memory")

    def _failed(self, exc: Exception) -> None:
        self._backoff.fail()
        if not self._is_failing:
            self._is_failing = True
            _log.warning("no shared memory for large tensors, which are sent over the wire: %s", exc)

    def _look(self) -> None:
        self._has_work.set()

    def _tell(self) -> None:
        pool = self._pool
        self._observer.holds(free=pool.free_bytes, used=pool.used_bytes, quarantined=pool.retired_bytes)

    async def _cleaned(self) -> bool:
        """Makes Triton unmap unneeded regions. Returns False if another check is needed."""
        try:
            await self._clean()
        except _FAILURES as exc:
            _log.debug("Triton's regions could not be listed: %s", exc)
            return False
        self._tell()
        return not self._pool.retired

    async def _clean(self) -> None:
        if not self._is_proven:
            return
        remove_leftovers()
        retired = self._pool.retired
        if await self._may_unregister():
            for name in filter(self._is_unneeded, await self._registry.names()):
                with suppress(RpcError):  # a request uses the region
                    await self._registry.unregister(name)
        names = await self._registry.names()
        for region in retired:
            if region.name not in names:
                self._pool.drop(region)

    def _is_unneeded(self, name: str) -> bool:
        """Whether a region is retired, is left from a failed registration, or belongs to a gateway that was killed."""
        return name not in self._pool.names if self._owner.owns(name) else is_abandoned(name)

    async def _may_unregister(self) -> bool:
        if self._counts_uses is None:
            self._counts_uses = await self._registry.counts_uses()
        return self._counts_uses
