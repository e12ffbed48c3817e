"""Reads streams in Redis. Any process may read every stream.

A reader that keeps up gets its events from memory: ``Tailer`` reads all streams that have readers in this process, with
one blocking command on one connection (docs/decisions/0007-resumable-streams.md). A slower reader reads from Redis
itself.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from redis.exceptions import RedisError

from app.core.errors import StreamEvicted, UpstreamUnavailable
from app.streams.events import MAX_READ_BYTES, Event, ReplayLog, check_resume
from app.streams.quota import evicted
from app.streams.redis_client import (
    END_ORPHAN,
    OUTAGE_S,
    PREFIX,
    PRESENCE_MS,
    RETRY_PAUSE_S,
    Keys,
    RedisClient,
    batches,
    entry_id,
    event_of,
    keys_of,
    lifetime_ms,
    owner_key,
    redis_errors,
)
from app.streams.store import unknown
from app.streams.stream import ProblemOf

BLOCK_MS = 500
TOUCH_S = 1.0
ORPHAN_S = 2.0
"""How long the owner's heartbeat may be missing while Redis answers, before a reader ends the stream."""
MAX_KEPT_BYTES = 64 * 1024
"""Limit of the events of each stream in memory, for readers that keep up."""
EVENTS_PER_COMMAND = 512
"""Limit of one fetch for all streams together; at least one event of each."""
PAUSE_PER_STREAM_S = 50e-6
MAX_PAUSE_S = 0.01
"""A command names every stream, so with more streams each command should fetch more events."""

_log = logging.getLogger(__name__)


class Reference(NamedTuple):
    """The description of a stream."""

    keys: Keys
    owner: str
    request_id: str
    lifetime_ms: int


class Tail(ReplayLog):
    """The newest events of one stream, for all its readers in this process."""

    def __init__(self, stream: Reference, newest: Event | None) -> None:
        """``newest``: the last event in Redis; the tail gets only later events."""
        super().__init__(MAX_KEPT_BYTES, after=newest)
        self.stream = stream
        self.readers = 0
        self.touched = -TOUCH_S
        self.orphaned_since: float | None = None
        self.is_lost = False
        """Whether its readers get UpstreamUnavailable."""

    def _add(self, event: Event) -> None:
        """Drops the older events if Redis has dropped the event before this one."""
        if event.id != self.last_id + 1:
            self.clear()
        super()._add(event)

    async def read(self, after: int) -> list[Event]:
        """Raises StreamEvicted if the next event was dropped, UpstreamUnavailable if the tail is lost."""
        while self.last_id <= after:
            if self.is_lost:
                raise UpstreamUnavailable("The gateway cannot read the stream from its store.")
            await self.grown()
        return self.newer_than(after)


class Tailer:
    """Reads all streams with readers in this process, with one blocking command on one connection."""

    def __init__(self, redis: RedisClient, owner: str, problem_of: ProblemOf) -> None:
        self._redis = redis
        self._problem_of = problem_of
        self._tails: dict[str, Tail] = {}
        """Tails by the key of the stream's events."""
        self._has_tails = asyncio.Event()
        self._wake_key = f"{PREFIX}:wake:{owner}"
        self._woken = "0-0"
        self._failing_since: float | None = None

    async def open(self, stream: Reference, newest: Event | None, redis: RedisClient) -> Tail:
        """Opens the tail for a further reader, which must call :meth:`close`. Raises redis-py's errors.

        The first reader interrupts the blocking command, which does not include the stream.
        """
        tail = self._tails.get(stream.keys.events)
        if tail is None:
            tail = self._tails[stream.keys.events] = Tail(stream, newest)
            self._has_tails.set()
        tail.readers += 1
        if tail.readers == 1 and not tail.has_ended:
            try:
                async with redis.pipeline(transaction=False) as pipe:
                    await pipe.xadd(self._wake_key, {"w": 1}, maxlen=1).pexpire(self._wake_key, PRESENCE_MS).execute()
            except BaseException:
                self.close(tail)
                raise
        return tail

    def close(self, tail: Tail) -> None:
        tail.readers -= 1
        if not tail.readers:
            self._forget(tail)

    async def run(self) -> None:
        """Reads until it is cancelled. Waits during an outage of Redis; raises any other exception."""
        while True:
            await self._has_tails.wait()
            now = time.monotonic()
            try:
                for batch in batches([tail for tail in self._tails.values() if now - tail.touched >= TOUCH_S]):
                    await self._touch(batch)
                for tail in list(self._tails.values()):
                    since = tail.orphaned_since
                    if not tail.has_ended and since is not None and now - since > ORPHAN_S:
                        await self._end(tail)
                await self._read()
                self._failing_since = None
            except (RedisError, OSError):
                self._failing_since = self._failing_since or now
                for tail in list(self._tails.values()):
                    tail.orphaned_since = None
                    if now - self._failing_since > OUTAGE_S:
                        self._lose(tail)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _read(self) -> None:
        """An unreadable entry ends only the connections to its stream."""
        running = {key: entry_id(tail.last_id) for key, tail in self._tails.items() if not tail.has_ended}
        count = max(1, EVENTS_PER_COMMAND // max(1, len(running)))
        found = await self._redis.xread({**running, self._wake_key: self._woken}, count=count, block=BLOCK_MS)
        for key, entries in found:
            if key.decode() == self._wake_key:
                self._woken = entries[-1][0]
            elif tail := self._tails.get(key.decode()):
                try:
                    tail.extend([event_of(entry) for entry in entries])
                except Exception:
                    _log.exception("a stream in Redis cannot be read", extra={"request_id": tail.stream.request_id})
                    self._lose(tail)
        if found:
            await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_PER_STREAM_S * len(running)))

    async def _touch(self, tails: Sequence[Tail]) -> None:
        """Renews the keys for readers, and checks the owners' heartbeats, and whether Redis still has the events."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for tail in tails:
                keys, lifetime = tail.stream.keys, tail.stream.lifetime_ms
                pipe.hmget(keys.stream, ["owner", "written"]).exists(owner_key(tail.stream.owner))
                pipe.pexpire(keys.events, lifetime).pexpire(keys.stream, lifetime).set(keys.readers, 1, px=PRESENCE_MS)
            seen: list[Any] = await pipe.execute()
        now = time.monotonic()
        for tail, (owner, is_written), is_alive, has_events in zip(
            tails, seen[::5], seen[1::5], seen[2::5], strict=True
        ):
            tail.touched = now
            if is_alive and owner == tail.stream.owner.encode() and (has_events or not is_written):
                tail.orphaned_since = None
            elif tail.orphaned_since is None:
                tail.orphaned_since = now

    async def _end(self, orphan: Tail) -> None:
        """Writes the terminal event of a stream whose process died. If several processes try, one succeeds."""
        stream = orphan.stream
        error = UpstreamUnavailable("The process that ran this stream has ended.")
        words = (stream.lifetime_ms, orphan.last_id, orjson.dumps(self._problem_of(error, stream.request_id)))
        newest = await self._redis.eval(END_ORPHAN, 2, stream.keys.events, stream.keys.stream, *words)
        if newest <= orphan.last_id:
            self._lose(orphan)

    def _lose(self, tail: Tail) -> None:
        self._forget(tail)
        tail.is_lost = True
        tail.wake()

    def _forget(self, tail: Tail) -> None:
        if self._tails.get(tail.stream.keys.events) is tail:
            del self._tails[tail.stream.keys.events]
        if not self._tails:
            self._has_tails.clear()
            self._failing_since = None


MAX_EVENTS = 256
"""Limit of one fetch of a reader."""
FIRST_EVENTS = 16
"""Limit of the first fetch, before the size of the events is known."""


async def open_reader(redis: RedisClient, tailer: Tailer, stream_id: str, after: int) -> "RedisReader | None":
    """As :meth:`app.streams.store.StreamStore.reader`.

    A failover of Redis may lose the newest events. A reader that had received them then writes the terminal event after
    them, so that they are missing before it.
    """
    keys = keys_of(stream_id)
    async with redis_errors():
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.stream).xrange(keys.events, count=1).xrevrange(keys.events, count=1)
            known, oldest, newest, count = await pipe.xlen(keys.events).execute()
        if not known:
            raise unknown()
        if b"evicted" in known:
            raise evicted()
        if b"written" in known and not newest:
            raise _lost()
        last, first_id = event_of(newest[0]) if newest else None, event_of(oldest[0]).id if oldest else 1
        try:
            lifetime = lifetime_ms(int(known[b"resume_ms"]) / 1e3)
            stream = Reference(keys, known[b"owner"].decode(), known[b"request_id"].decode(), lifetime)
        except (KeyError, ValueError) as exc:
            raise StreamEvicted("The description of this stream in Redis cannot be read.") from exc
        last_id, has_ended = (last.id, last.is_terminal) if last else (0, False)
        if not check_resume(after, first_id, last_id, has_ended=has_ended):
            return None
        has_gap, following = count <= last_id - first_id, entry_id(after + 1)
        if last and has_gap and after < last_id and not await redis.xrange(keys.events, following, following):
            raise _lost()
        return RedisReader(redis, tailer, await tailer.open(stream, last, redis))


class RedisReader:
    """A reader of one stream in Redis. Implements :class:`app.streams.store.Reader`.

    A reader that keeps up gets its events from a :class:`Tail`. A slower reader reads from Redis itself.
    """

    is_full = False

    def __init__(self, redis: RedisClient, tailer: Tailer, tail: Tail) -> None:
        self._redis = redis
        self._tailer = tailer
        self._tail: Tail | None = tail
        self._count = FIRST_EVENTS
        self._failing_since: float | None = None

    async def read(self, after: int) -> list[Event]:
        """Also waits during a short outage of Redis. Raises StreamEvicted or UpstreamUnavailable.

        May be cancelled at any await, as each heartbeat does.
        """
        assert self._tail is not None, "the reader is open"
        while True:
            try:
                return await self._tail.read(after)
            except StreamEvicted:
                events = await self._replay(after, self._tail.stream.keys.events)
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

    async def _replay(self, after: int, key: str) -> list[Event] | None:
        """Returns events that only Redis has, up to the first lost one; None during an outage.

        Raises UpstreamUnavailable after a long outage.
        """
        try:
            async with redis_errors():
                found = await self._redis.xrange(key, min=entry_id(after + 1), count=self._count)
        except UpstreamUnavailable:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since > OUTAGE_S:
                raise
            return None
        self._failing_since = None
        events = [event_of(entry) for entry in found]
        size = sum(event.size for event in events)
        self._count = max(1, min(MAX_EVENTS, MAX_READ_BYTES * len(events) // max(1, size)))
        return [event for place, event in enumerate(events) if event.id == events[0].id + place]


def _lost() -> StreamEvicted:
    return StreamEvicted("The events after this id were dropped: the buffer keeps only the newest events.")
