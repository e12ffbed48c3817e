"""Large tensors through shared memory, and over the wire wherever that is not possible.

A region is made when no free one is large enough, registered with Triton, and kept for later calls. After a call that
Triton answered, the region is free. After any other call Triton may still read or write the region: it is never used
again. It is unregistered, and dropped as soon as Triton does not map it any more.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

from google.protobuf.message import DecodeError

from app.domain.backoff import Backoff
from app.domain.inference import InferenceRequest
from app.domain.model import ModelConfig
from app.triton.shared_memory.bodies import Bodies
from app.triton.shared_memory.layout import LARGE_BYTES, Layouts
from app.triton.shared_memory.lease import Lease
from app.triton.shared_memory.owner import Owner, is_abandoned, remove_leftovers
from app.triton.shared_memory.pool import Pool
from app.triton.shared_memory.region import Region, rounded
from app.triton.shared_memory.registry import Registry
from app.triton.transport import RpcError, Transport

Way = Literal["shared_memory", "full", "unavailable", "lost"]
"""How a call with a large tensor travelled. All but the first: over the wire."""

IDLE_S = 60.0
"""A region that no call has used for so long is given back to the system."""
_FIRST_LOOK_S = 0.05
_LONGEST_LOOK_S = 5.0
_FAILURES = (OSError, RpcError, DecodeError)
_LOST = "Unable to find shared memory region"
_log = logging.getLogger(__name__)


class LaneObserver(Protocol):
    def called(self, way: Way) -> None:
        """A call with a large tensor starts."""

    def holds(self, *, free: int, used: int, quarantined: int) -> None:
        """The bytes of all regions, after each change."""


class NoLaneObserver:
    def called(self, way: Way) -> None: ...

    def holds(self, *, free: int, used: int, quarantined: int) -> None: ...


class Lane:
    """``limit``: bytes of all regions together. ``large_bytes``: of the smallest tensor that takes the lane."""

    def __init__(
        self,
        transport: Transport,
        limit: int,
        observer: LaneObserver | None = None,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        self._registry = Registry(transport)
        self._pool = Pool(limit)
        self._owner = Owner()
        self._layouts = Layouts(large_bytes)
        self.bodies = Bodies(self._pool, limit // 2, large_bytes, self._tell)
        self._observer = observer or NoLaneObserver()
        self._backoff = Backoff()
        self._is_proven = False
        """Whether Triton has mapped a region once, so that its ``/dev/shm`` is the gateway's."""
        self._is_failing = False
        self._counts_uses: bool | None = None
        """Whether this Triton unregisters safely; None: it was not asked since it started."""
        self._has_work = asyncio.Event()

    def learn(self, config: ModelConfig, version: str) -> None:
        """What Triton says of a model. A model that the lane does not know travels over the wire."""
        self._layouts.learn(config, version)

    async def lease(self, request: InferenceRequest) -> Lease | None:
        """Regions for the large tensors of the request; None if the request travels over the wire."""
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
        """Whether Triton failed the call, before it ran the model, because it does not know the region.

        Triton was started again: the other regions are lost too.
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
        """Drops the regions that Triton has let go of, until it is cancelled."""
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
        """Call this when no call is under way."""
        if self._counts_uses:
            self._pool.retire_free(time.monotonic())
            await self._cleaned()
        self._owner.release()

    def _ended(self, own: Region | None, regions: Sequence[Region], is_answered: bool) -> None:
        """``regions``: of the call. Those of bodies, all but ``own``, are given back after the request."""
        if not is_answered:
            for region in regions:
                self._pool.retire(region)
            self._look()
        elif own is not None:
            self._pool.give_back(own)
        self._tell()

    async def _made(self, size: int) -> Region | None:
        """A new region, used by the call that it is made for. None: the call travels over the wire."""
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
        """The free regions are too small."""
        if self._counts_uses:
            self._pool.retire_free(time.monotonic())
            self._look()

    async def _registered(self, size: int) -> Region:
        """Raises OSError, RpcError or DecodeError."""
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
            _log.info("large tensors travel through shared memory")

    def _failed(self, exc: Exception) -> None:
        self._backoff.fail()
        if not self._is_failing:
            self._is_failing = True
            _log.warning("no shared memory for large tensors, which travel over the wire: %s", exc)

    def _look(self) -> None:
        self._has_work.set()

    def _tell(self) -> None:
        pool = self._pool
        self._observer.holds(free=pool.free_bytes, used=pool.used_bytes, quarantined=pool.retired_bytes)

    async def _cleaned(self) -> bool:
        """Makes Triton unmap what nobody needs any more. False if another look is needed."""
        try:
            await self._clean()
        except _FAILURES as exc:
            _log.debug("Triton's regions could not be looked at: %s", exc)
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
        """Retired, left by a registration that seemed to fail, or of a gateway that was killed."""
        return name not in self._pool.names if self._owner.owns(name) else is_abandoned(name)

    async def _may_unregister(self) -> bool:
        if self._counts_uses is None:
            self._counts_uses = await self._registry.counts_uses()
        return self._counts_uses
