"""Reads all streams with readers in this process, with one blocking command on one connection.

A reader that keeps up gets its events from memory. A slower reader reads from Redis itself.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from redis.exceptions import RedisError

from app.domain.errors import UpstreamUnavailable
from app.streams.event import Event
from app.streams.log import ReplayLog
from app.streams.redis_connections import OUTAGE_S, RETRY_PAUSE_S, RedisClient
from app.streams.redis_keys import (
    END_ORPHAN,
    PRESENCE_MS,
    Entry,
    Keys,
    batches,
    entry_id,
    event_of,
    lifetime_ms,
    owner_key,
    wake_key,
)
from app.streams.stream import ProblemOf

BLOCK_MS = 500
TOUCH_S = 1.0
ORPHAN_S = 2.0
"""How long the owner's heartbeat may be missing while Redis answers, before a reader ends the stream."""
MAX_KEPT_BYTES = 64 * 1024
"""Limit of the events of each stream in memory, for readers that keep up."""
MAX_EVENTS = 512
"""Limit of one fetch for all streams together; at least one event of each."""
PAUSE_PER_STREAM_S = 50e-6
MAX_PAUSE_S = 0.01
"""A command names every stream, so with more streams each command should fetch more events."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reference:
    """The state of a stream when a reader opens it."""

    keys: Keys
    owner: str
    request_id: str
    resume_s: float
    start_key: str = ""
    """The key in Redis of the stream's idempotency key; empty without one."""


class Tail(ReplayLog):
    """The newest events of one stream, for all its readers in this process."""

    def __init__(self, stream: Reference, newest: Event | None) -> None:
        """``newest``: the last event in Redis; the tail gets only later events."""
        super().__init__(MAX_KEPT_BYTES, after=newest)
        self.stream = stream
        self.readers = 0
        self.touched = -TOUCH_S
        self.orphaned_since: float | None = None
        self._is_lost = False

    def _add(self, event: Event) -> None:
        """Drops the older events if Redis has dropped the event before this one."""
        if event.id != self.last_id + 1:
            self.clear()
        super()._add(event)

    async def read(self, after: int) -> list[Event]:
        """Raises StreamEvicted if the next event was dropped, UpstreamUnavailable after :meth:`lose`."""
        while self.last_id <= after:
            if self._is_lost:
                raise UpstreamUnavailable("The gateway cannot read the stream from its store.")
            await self.grown()
        return self.newer_than(after)

    def lose(self) -> None:
        """Ends the wait of all readers with UpstreamUnavailable."""
        self._is_lost = True
        self.wake()

    @property
    def is_orphan(self) -> bool:
        return (
            not self.has_ended and self.orphaned_since is not None and time.monotonic() - self.orphaned_since > ORPHAN_S
        )


class Tailer:
    def __init__(self, redis: RedisClient, owner: str, problem_of: ProblemOf) -> None:
        self._redis = redis
        self._problem_of = problem_of
        self._tails: dict[str, Tail] = {}
        """Tails by the key of the stream's events."""
        self._has_tails = asyncio.Event()
        self._wake_key = wake_key(owner)
        self._woken = "0-0"
        self._failing_since: float | None = None

    def open(self, stream: Reference, newest: Event | None) -> Tail:
        """Opens the tail for a further reader, which must call :meth:`close`."""
        tail = self._tails.get(stream.keys.events)
        if tail is None:
            tail = self._tails[stream.keys.events] = Tail(stream, newest)
            self._has_tails.set()
        tail.readers += 1
        return tail

    def close(self, tail: Tail) -> None:
        tail.readers -= 1
        if not tail.readers:
            self._forget(tail)

    async def wake(self, redis: RedisClient) -> None:
        """Interrupts the blocking command, which does not include the newest tail. Raises redis-py's errors."""
        async with redis.pipeline(transaction=False) as pipe:
            await pipe.xadd(self._wake_key, {"w": 1}, maxlen=1).pexpire(self._wake_key, PRESENCE_MS).execute()

    async def run(self) -> None:
        """Reads until it is cancelled. Waits during an outage of Redis; raises any other exception."""
        while True:
            await self._has_tails.wait()
            try:
                await self._touch_due()
                await self._end_orphans()
                await self._read()
            except (RedisError, OSError):
                self._note_outage()
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._failing_since = None

    async def _read(self) -> None:
        running = {key: entry_id(tail.last_id) for key, tail in self._tails.items() if not tail.has_ended}
        count = max(1, MAX_EVENTS // max(1, len(running)))
        found = await self._redis.xread({**running, self._wake_key: self._woken}, count=count, block=BLOCK_MS)
        for key, entries in found:
            if key.decode() == self._wake_key:
                self._woken = entries[-1][0]
            elif tail := self._tails.get(key.decode()):
                self._deliver(tail, entries)
        if found:
            await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_PER_STREAM_S * len(running)))

    def _deliver(self, tail: Tail, entries: list[Entry]) -> None:
        """An unreadable entry ends only the connections to its stream."""
        try:
            tail.extend([event_of(entry) for entry in entries])
        except Exception:
            _log.exception("a stream in Redis cannot be read", extra={"request_id": tail.stream.request_id})
            self._lose(tail)

    async def _touch_due(self) -> None:
        now = time.monotonic()
        due = [tail for tail in self._tails.values() if now - tail.touched >= TOUCH_S]
        for batch in batches(due):
            await self._touch(batch)

    async def _touch(self, tails: Sequence[Tail]) -> None:
        """Renews the keys for readers, and checks the owners' heartbeats, and whether Redis still has the events."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for tail in tails:
                keys, lifetime = tail.stream.keys, lifetime_ms(tail.stream.resume_s)
                pipe.hmget(keys.stream, ["owner", "written"]).exists(owner_key(tail.stream.owner))
                pipe.set(keys.readers, 1, px=PRESENCE_MS).pexpire(keys.events, lifetime).pexpire(keys.stream, lifetime)
                pipe.pexpire(tail.stream.start_key or keys.stream, lifetime)
            seen: list[Any] = await pipe.execute()
        now = time.monotonic()
        for tail, (owner, is_written), is_alive, has_events in zip(
            tails, seen[::6], seen[1::6], seen[3::6], strict=True
        ):
            tail.touched = now
            if is_alive and owner == tail.stream.owner.encode() and (has_events or not is_written):
                tail.orphaned_since = None
            elif tail.orphaned_since is None:
                tail.orphaned_since = now

    async def _end_orphans(self) -> None:
        """Writes the terminal event of each stream whose process died. If several processes try, one succeeds."""
        for tail in [tail for tail in self._tails.values() if tail.is_orphan]:
            stream = tail.stream
            error = UpstreamUnavailable("The process that ran this stream has ended.")
            data = orjson.dumps(self._problem_of(error, stream.request_id))
            words = (lifetime_ms(stream.resume_s), tail.last_id, data)
            newest = await self._redis.eval(END_ORPHAN, 2, stream.keys.events, stream.keys.stream, *words)
            if newest <= tail.last_id:
                self._lose(tail)

    def _note_outage(self) -> None:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        for tail in list(self._tails.values()):
            tail.orphaned_since = None
            if now - self._failing_since > OUTAGE_S:
                self._lose(tail)

    def _lose(self, tail: Tail) -> None:
        self._forget(tail)
        tail.lose()

    def _forget(self, tail: Tail) -> None:
        if self._tails.get(tail.stream.keys.events) is tail:
            del self._tails[tail.stream.keys.events]
        if not self._tails:
            self._has_tails.clear()
            self._failing_since = None
