"""The store of several processes: a stream runs where it was started, and is read and deleted anywhere.

The process that runs a stream, its owner, publishes the events to a Redis Stream. One loop per owner says that it lives
and looks who reads and what was deleted; a reader ends a stream whose owner died, so that it always ends well.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from app.domain.errors import ClientClosedRequest, UnknownStream
from app.streams.event import Event
from app.streams.log import MAX_REPLAY_BYTES, EventLog, LiveLog
from app.streams.redis_keys import PUBLISH, keys_of, lifetime_ms, owner_key, script_words
from app.streams.redis_reader import OUTAGE_S, PAUSE_S, RedisClient, RedisReader, Reference, redis_errors
from app.streams.store import StoreUnusable, new_stream_id
from app.streams.stream import ProblemOf, Stream

TICK_S = 0.5
OWNER_MS = 4_000
"""How long the owner's sign of life lasts."""
MAX_UNPUBLISHED_BYTES = 4 * 1024 * 1024
"""What a stream may be ahead of Redis."""
MAX_BATCH_BYTES = 256 * 1024
FAREWELL_S = 2.0
"""For the last events of ended streams to be published."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Owned:
    stream: Stream
    resume_s: float
    read_at: float
    """When somebody was last seen reading, on the monotonic clock."""
    window: "_Window"
    publishing: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Window:
    """Which events stay in Redis: the newest, bounded in bytes."""

    max_bytes: int
    sizes: deque[tuple[int, int]] = field(default_factory=deque)
    total: int = 0

    def first_id_with(self, events: list[Event]) -> int:
        """The id of the oldest event to stay when ``events`` are added."""
        self.sizes.extend((event.id, event.size) for event in events)
        self.total += sum(event.size for event in events)
        while self.total > self.max_bytes and len(self.sizes) > 1:
            self.total -= self.sizes.popleft()[1]
        return self.sizes[0][0]


class RedisStore:
    """Implements :class:`app.streams.store.StreamStore`."""

    def __init__(self, url: str, problem_of: ProblemOf, *, max_replay_bytes: int = MAX_REPLAY_BYTES) -> None:
        retry = Retry(ExponentialBackoff(cap=0.2, base=0.05), retries=2)
        self._redis: RedisClient = Redis.from_url(
            url, protocol=2, socket_connect_timeout=2, socket_timeout=5, retry=retry
        )
        self._problem_of = problem_of
        self._max_replay_bytes = max_replay_bytes
        self._owner = secrets.token_hex(8)
        self._owned: dict[str, _Owned] = {}
        self._watching: asyncio.Task[None] | None = None

    def new_log(self) -> EventLog:
        return LiveLog(MAX_UNPUBLISHED_BYTES)

    async def keep(self, stream: Stream, resume_s: float) -> str:
        stream_id = new_stream_id()
        keys = keys_of(stream_id)
        known = {"owner": self._owner, "request_id": stream.request_id, "resume_ms": round(resume_s * 1e3)}
        with redis_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.hset(keys.stream, mapping=known).pexpire(keys.stream, lifetime_ms(resume_s)).execute()
        owned = self._owned[stream_id] = _Owned(stream, resume_s, time.monotonic(), _Window(self._max_replay_bytes))
        owned.publishing = asyncio.create_task(self._publish(stream_id, owned))
        return stream_id

    async def reader(self, stream_id: str) -> RedisReader:
        keys = keys_of(stream_id)
        with redis_errors():
            known = await self._redis.hgetall(keys.stream)
            if not known:
                raise UnknownStream("There is no such stream, or it has expired.")
            reference = Reference(
                keys, known[b"owner"].decode(), known[b"request_id"].decode(), int(known[b"resume_ms"]) / 1e3
            )
            reader = RedisReader(self._redis, reference, self._problem_of)
            await reader.touch()
        return reader

    async def delete(self, stream_id: str) -> None:
        """The owner sees within TICK_S that its stream is gone; who reads it still gets the terminal event."""
        with redis_errors():
            if not await self._redis.delete(keys_of(stream_id).stream):
                raise UnknownStream("There is no such stream, or it has expired.")

    async def __aenter__(self) -> Self:
        """Raises StoreUnusable."""
        try:
            await self._heartbeat()
        except (RedisError, OSError) as exc:
            await self._redis.aclose()
            raise StoreUnusable(
                f"GATEWAY_REDIS_URL: Redis at {self._address()} does not answer: {type(exc).__name__}"
            ) from exc
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ended streams are published to their end; the sign of life goes last."""
        publishing = {owned.publishing for owned in self._owned.values() if owned.publishing is not None}
        if publishing:
            await asyncio.wait(publishing, timeout=FAREWELL_S)
        for task in (*publishing, self._watching):
            await _stopped(task)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.delete(owner_key(self._owner))
        await self._redis.aclose()

    def _address(self) -> str:
        """Without the password."""
        known = self._redis.get_connection_kwargs()
        return str(known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}")

    async def _publish(self, stream_id: str, owned: _Owned) -> None:
        """Until the terminal event is in Redis, or nothing can be written there any more."""
        try:
            after = 0
            while True:
                events = await owned.stream.log.read(after)
                for batch in batches_of(events):
                    await self._write(stream_id, owned, batch)
                after = events[-1].id
                if events[-1].is_terminal:
                    return
        except _Lost:
            owned.stream.end(ClientClosedRequest("Nobody can read the stream any more: its store lost it."))
        finally:
            del self._owned[stream_id]

    async def _write(self, stream_id: str, owned: _Owned, batch: list[Event]) -> None:
        """Tries for a while where Redis is away. Raises _Lost."""
        words = (lifetime_ms(owned.resume_s), owned.window.first_id_with(batch), *script_words(batch))
        ends = time.monotonic() + OUTAGE_S
        while True:
            try:
                is_written = await self._redis.eval(PUBLISH, 1, keys_of(stream_id).events, *words)
                break
            except (RedisError, OSError) as exc:
                if time.monotonic() > ends:
                    raise _Lost from exc
                await asyncio.sleep(PAUSE_S)
        if not is_written:
            raise _Lost

    async def _watch(self) -> None:
        is_away = False
        while True:
            try:
                await self._heartbeat()
                is_away = False
            except (RedisError, OSError) as exc:
                if not is_away:
                    _log.warning("Redis does not answer", extra={"error": type(exc).__name__})
                is_away = True
            await asyncio.sleep(TICK_S)

    async def _heartbeat(self) -> None:
        """Says that this process lives, keeps its streams from expiring, and ends those nobody wants or can read."""
        owned = list(self._owned.items())
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(owner_key(self._owner), 1, px=OWNER_MS)
            for stream_id, each in owned:
                keys, lifetime = keys_of(stream_id), lifetime_ms(each.resume_s)
                pipe.hget(keys.stream, "owner").exists(keys.readers)
                pipe.pexpire(keys.stream, lifetime).pexpire(keys.events, lifetime)
            seen: list[Any] = (await pipe.execute())[1:]
        for index, (_, each) in enumerate(owned):
            self._end_if_unwanted(each, owner=seen[4 * index], has_reader=bool(seen[4 * index + 1]))

    def _end_if_unwanted(self, owned: _Owned, *, owner: bytes | None, has_reader: bool) -> None:
        now = time.monotonic()
        if has_reader:
            owned.read_at = now
        if owner is None:
            owned.stream.end(ClientClosedRequest("The stream was deleted."))
        elif owner != self._owner.encode():
            owned.stream.end(ClientClosedRequest("This process was taken for dead, and the stream was ended."))
        elif now - owned.read_at > owned.resume_s:
            owned.stream.end(ClientClosedRequest(f"Nobody read the stream for {owned.resume_s:g} s."))


class _Lost(Exception):
    """The stream can no longer be written."""


def batches_of(events: list[Event]) -> list[list[Event]]:
    """Of at least one event, and at most MAX_BATCH_BYTES where that is more."""
    batches: list[list[Event]] = []
    room = 0
    for event in events:
        if not batches or event.size > room:
            batches.append([])
            room = MAX_BATCH_BYTES
        batches[-1].append(event)
        room -= event.size
    return batches


async def _stopped(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
