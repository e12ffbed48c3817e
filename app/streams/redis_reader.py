"""A reader of a stream in Redis, which any process may run."""

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple, cast

from app.domain.errors import StreamEvicted, UnknownStream, UpstreamUnavailable
from app.streams.event import Event
from app.streams.log import MAX_READ_BYTES, check_resume
from app.streams.quota import evicted
from app.streams.redis_connections import OUTAGE_S, RETRY_PAUSE_S, RedisClient, redis_errors
from app.streams.redis_keys import Entry, Keys, entry_id, event_of
from app.streams.redis_tailer import Reference, Tail, Tailer

MAX_EVENTS = 256
"""Limit of one fetch of a reader."""
FIRST_EVENTS = 16
"""Limit of the first fetch, before the size of the events is known."""


class Held(NamedTuple):
    """What Redis has of a stream: its oldest and newest event, and the number of events."""

    first: Event | None = None
    last: Event | None = None
    events: int = 0

    @property
    def has_gap(self) -> bool:
        """Whether events between the oldest and the newest are lost."""
        return self.first is not None and self.last is not None and self.events <= self.last.id - self.first.id


class RedisReader:
    """Implements :class:`app.streams.store.Reader`."""

    def __init__(self, redis: RedisClient, tailer: Tailer, stream: Reference, held: "Held") -> None:
        self._redis = redis
        self._tailer = tailer
        self._stream = stream
        self._held = held
        self._tail: Tail | None = None
        self._count = FIRST_EVENTS
        self._failing_since: float | None = None

    @property
    def is_full(self) -> bool:
        return False

    @classmethod
    async def open(cls, redis: RedisClient, tailer: Tailer, keys: Keys) -> "RedisReader":
        """Raises UnknownStream, StreamEvicted or UpstreamUnavailable."""
        with redis_errors():
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.stream).xrange(keys.events, count=1).xrevrange(keys.events, count=1)
                known, oldest, newest, count = await pipe.xlen(keys.events).execute()
        if not known:
            raise UnknownStream("There is no such stream, or it has expired.")
        if b"evicted" in known:
            raise evicted()
        if b"written" in known and not newest:
            raise _lost()
        held = Held(event_of(oldest[0]), event_of(newest[0]), count) if newest else Held()
        return cls(redis, tailer, _reference(keys, known), held)

    async def resume(self, after: int) -> bool:
        first, last, has_gap = self._held.first, self._held.last, self._held.has_gap
        self._held = Held()
        has_ended = last is not None and last.is_terminal
        is_left = check_resume(after, first.id if first else 1, last.id if last else 0, has_ended=has_ended)
        if is_left and has_gap and last is not None and after < last.id:
            await self._require(after + 1)
        if is_left:
            await self._follow(last)
        return is_left

    async def read(self, after: int) -> list[Event]:
        """Also waits during a short outage of Redis. Raises StreamEvicted or UpstreamUnavailable.

        May be cancelled at any await, as each heartbeat does.
        """
        assert self._tail is not None, "read follows resume"
        while True:
            try:
                return await self._tail.read(after)
            except StreamEvicted:
                events = await self._replay(after)
            if events is None:
                await asyncio.sleep(RETRY_PAUSE_S)
            elif not events or events[0].id != after + 1:
                raise _lost()
            else:
                return events

    async def close(self) -> None:
        """Leaves the key for readers to expire, because another process may have a reader too."""
        tail, self._tail = self._tail, None
        if tail is not None:
            self._tailer.close(tail)

    async def _follow(self, newest: Event | None) -> None:
        self._tail = self._tailer.open(self._stream, newest)
        if self._tail.readers == 1 and not self._tail.has_ended:
            with redis_errors():
                await self._tailer.wake(self._redis)

    async def _require(self, event_id: int) -> None:
        """Raises StreamEvicted if Redis does not have the event. A failover of Redis may lose the newest events.

        A reader that had received them then writes the terminal event after them, so that they are missing before it.
        """
        with redis_errors():
            if not await self._redis.xrange(self._stream.keys.events, entry_id(event_id), entry_id(event_id)):
                raise _lost()

    async def _replay(self, after: int) -> list[Event] | None:
        """Returns events that only Redis has, up to the first lost one; None during an outage.

        Raises UpstreamUnavailable after a long outage.
        """
        try:
            with redis_errors():
                found = await self._redis.xrange(self._stream.keys.events, min=entry_id(after + 1), count=self._count)
        except UpstreamUnavailable:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since > OUTAGE_S:
                raise
            return None
        self._failing_since = None
        events = [event_of(entry) for entry in cast("list[Entry]", found)]
        self._count = _count_for(events)
        return [event for place, event in enumerate(events) if event.id == events[0].id + place]


def _lost() -> StreamEvicted:
    return StreamEvicted("The events after this id were dropped: the buffer keeps only the newest events.")


def _reference(keys: Keys, known: Mapping[bytes, bytes]) -> Reference:
    """Raises StreamEvicted for a description that no gateway wrote."""
    try:
        owner, request_id, resume_s = known[b"owner"], known[b"request_id"], int(known[b"resume_ms"]) / 1e3
        return Reference(keys, owner.decode(), request_id.decode(), resume_s, known.get(b"start", b"").decode())
    except (KeyError, ValueError) as exc:
        raise StreamEvicted("The description of this stream in Redis cannot be read.") from exc


def _count_for(events: list[Event]) -> int:
    """The number of events of this size in about MAX_READ_BYTES."""
    size = sum(event.size for event in events)
    return max(1, min(MAX_EVENTS, MAX_READ_BYTES * len(events) // max(1, size)))
