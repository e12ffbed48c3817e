"""A connection to a stream in Redis, wherever the process is that runs it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import orjson
from redis.exceptions import RedisError

from app.domain.errors import StreamEvicted, UpstreamUnavailable
from app.streams.event import Event
from app.streams.log import check_resume
from app.streams.redis_keys import END_ORPHAN, Entry, Keys, entry_id, event_of, lifetime_ms, owner_key
from app.streams.stream import ProblemOf

RedisClient = Any
"""redis-py's ``Redis``, whose types fit neither a chain of calls on a pipeline nor the answers of protocol 2."""

BLOCK_MS = 500
TOUCH_S = 1.0
PRESENCE_MS = 3_000
ORPHAN_S = 2.0
"""How long the owner's sign of life may be missing, while Redis answers, before its streams are ended for it."""
OUTAGE_S = 30.0
"""How long a reader that is there already waits for a Redis that went away."""
PAUSE_S = 0.25
MAX_EVENTS = 256
"""Events fetched at once."""


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turns whatever redis-py raises into UpstreamUnavailable, without Redis' own message, which may hold keys."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise UpstreamUnavailable("The store of streams is not available; send the request again.") from exc


@dataclass(frozen=True, slots=True)
class Reference:
    """What is known of a stream when a reader comes."""

    keys: Keys
    owner: str
    request_id: str
    resume_s: float


class RedisReader:
    """Implements :class:`app.streams.store.Reader`."""

    def __init__(self, redis: RedisClient, stream: Reference, problem_of: ProblemOf) -> None:
        self._redis = redis
        self._stream = stream
        self._problem_of = problem_of
        self._touched = -TOUCH_S
        self._orphaned_since: float | None = None
        self._failing_since: float | None = None

    async def resume(self, after: int) -> bool:
        events = self._stream.keys.events
        with redis_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                first, last = await pipe.xrange(events, count=1).xrevrange(events, count=1).execute()
        if not last:
            return check_resume(after, 1, 0, has_ended=False)
        newest = event_of(last[0])
        return check_resume(after, event_of(first[0]).id, newest.id, has_ended=newest.is_terminal)

    async def read(self, after: int) -> list[Event]:
        """Waits also for a Redis that is away for a moment. Raises StreamEvicted or UpstreamUnavailable.

        May be cancelled at any await, as each ping does: what it has to remember is in the reader.
        """
        while True:
            events = await self._unless_away(after)
            if events and events[0].id != after + 1:
                raise StreamEvicted("The events behind this id are gone: the stream's buffer keeps the newest only.")
            if events:
                return events

    async def close(self) -> None:
        """The key that says there is a reader expires: another connection may be reading still."""

    async def touch(self) -> None:
        """Says that there is a reader, and looks whether the owner lives. Raises what redis-py raises."""
        keys, lifetime = self._stream.keys, lifetime_ms(self._stream.resume_s)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(keys.readers, 1, px=PRESENCE_MS).pexpire(keys.events, lifetime).pexpire(keys.stream, lifetime)
            *_, is_known, is_alive = await pipe.exists(keys.stream).exists(owner_key(self._stream.owner)).execute()
        self._touched = time.monotonic()
        if is_known and is_alive:
            self._orphaned_since = None
        elif self._orphaned_since is None:
            self._orphaned_since = self._touched

    async def _unless_away(self, after: int) -> list[Event]:
        """What comes within a short wait. Raises UpstreamUnavailable where Redis has been away for too long."""
        try:
            with redis_errors():
                events = await self._behind(after)
        except UpstreamUnavailable:
            now = time.monotonic()
            self._failing_since, self._orphaned_since = self._failing_since or now, None
            if now - self._failing_since > OUTAGE_S:
                raise
            await asyncio.sleep(PAUSE_S)
            return []
        self._failing_since = None
        return events

    async def _behind(self, after: int) -> list[Event]:
        if time.monotonic() - self._touched >= TOUCH_S:
            await self.touch()
        if self._is_orphan():
            await self._end_orphan(after)
        events = self._stream.keys.events
        found = await self._redis.xread({events: entry_id(after)}, count=MAX_EVENTS, block=BLOCK_MS)
        entries = cast("list[Entry]", found[0][1]) if found else []
        return [event_of(entry) for entry in entries]

    def _is_orphan(self) -> bool:
        return self._orphaned_since is not None and time.monotonic() - self._orphaned_since > ORPHAN_S

    async def _end_orphan(self, after: int) -> None:
        """Writes the terminal event of a stream whose process died; of several readers that try, one does."""
        stream = self._stream
        error = UpstreamUnavailable("The process that ran this stream is gone.")
        data = orjson.dumps(self._problem_of(error, stream.request_id))
        words = (lifetime_ms(stream.resume_s), after, data)
        await self._redis.eval(END_ORPHAN, 2, stream.keys.events, stream.keys.stream, *words)
