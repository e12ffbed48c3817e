"""Limits what the streams of this process use in Redis, as :class:`app.streams.memory_store.MemoryStore` does."""

import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from app.core.redis_pool import RedisClient, batches
from app.streams.quota import KeepLimits, KeepQuota, KeptStream, Usage
from app.streams.redis_client import EVICT, PRESENCE_MS, keys_of


class KeptInRedis:
    """Knows the running streams of this process, and the ended ones until their keys are gone from Redis.

    Another process may read an ended stream, which renews its keys, so each stream is looked at when it should have
    expired.
    """

    def __init__(self, redis: RedisClient, limits: KeepLimits) -> None:
        self._redis = redis
        self._quota = KeepQuota(limits)
        self._due: list[tuple[float, int, KeptStream]] = []
        """A heap: when to look at an ended stream again, on the monotonic clock."""
        self._counter = count()
        self._ended: set[KeptStream] = set()

    @property
    def usage(self) -> Usage:
        return self._quota.total

    async def make_room_for_stream(self, caller: str) -> None:
        """Evicts ended streams until a further one fits. Raises TooManyRequests or redis-py's errors."""
        if not await self._make_room(caller, streams=1):
            raise self._quota.refusal(caller)

    def add(self, stream_id: str, caller: str) -> KeptStream:
        kept = KeptStream(stream_id, caller)
        self._quota.add(kept)
        return kept

    async def grow(self, kept: KeptStream, size: int) -> bool:
        """Accounts for events. Returns False if nothing can be evicted to make room for them.

        Raises redis-py's errors. ``size``: in bytes; negative for dropped events.
        """
        self._quota.grow(kept, size)
        return await self._make_room(kept.caller)

    def ended(self, kept: KeptStream, lifetime_s: float) -> None:
        """``lifetime_s``: until its keys expire if nobody reads it."""
        self._ended.add(kept)
        self._quota.mark(kept, evictable=True)
        self._look_again(kept, lifetime_s)

    def remove(self, kept: KeptStream) -> None:
        """Called for a stream that is not in Redis any more."""
        self._ended.discard(kept)
        self._quota.remove(kept)

    async def refresh(self) -> None:
        """Removes ended streams that have expired. Raises redis-py's errors."""
        now = time.monotonic()
        due: list[KeptStream] = []
        while self._due and self._due[0][0] <= now:
            due.append(heappop(self._due)[2])
        for batch in batches([kept for kept in due if kept in self._ended]):
            await self._look_at(batch)

    async def _make_room(self, caller: str, streams: int = 0) -> bool:
        while self._quota.is_over(caller, streams):
            victim = self._quota.victim(caller, streams)
            if victim is None:
                return False
            await self._evict(victim)
        return True

    async def _evict(self, victim: KeptStream) -> None:
        """Deletes the events of a stream, unless it has a reader."""
        self._quota.mark(victim, evictable=False)
        keys = keys_of(victim.id)
        if await self._redis.eval(EVICT, 3, keys.events, keys.stream, keys.readers):
            self.remove(victim)
        else:
            self._look_again(victim, PRESENCE_MS / 1e3)

    async def _look_at(self, batch: Sequence[KeptStream]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for kept in batch:
                keys = keys_of(kept.id)
                pipe.pttl(keys.events).exists(keys.readers)
            seen: list[Any] = await pipe.execute()
        for kept, left_ms, has_reader in zip(batch, seen[::2], seen[1::2], strict=True):
            if left_ms <= 0:
                self.remove(kept)
                continue
            self._quota.mark(kept, evictable=not has_reader)
            self._look_again(kept, PRESENCE_MS / 1e3 if has_reader else left_ms / 1e3)

    def _look_again(self, kept: KeptStream, after_s: float) -> None:
        heappush(self._due, (time.monotonic() + after_s, next(self._counter), kept))
