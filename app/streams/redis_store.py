"""Stores streams in Redis: a stream runs in the process that started it; any process can read and delete it.

The process that runs a stream, its owner, publishes the events to a Redis Stream. Each owner sends a heartbeat, which
also checks which of its streams have readers and which were deleted. If an owner died, a reader writes the terminal
event of its streams, so that every stream has one.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from app.core.errors import Internal, StreamCancelled, UpstreamUnavailable
from app.streams.events import EVENT_BYTES, MAX_REPLAY_BYTES, STALL_S, Event, EventLog, LiveLog
from app.streams.quota import KEEP_LIMITS, KeepLimits, KeptStream, evicted
from app.streams.redis_client import (
    ANSWER_S,
    DISOWN,
    EVICT,
    OUTAGE_S,
    PRESENCE_MS,
    PUBLISH,
    RETRY_PAUSE_S,
    UNAVAILABLE,
    Connections,
    RedisNotes,
    batches,
    keys_of,
    lifetime_ms,
    owner_key,
    redis_errors,
)
from app.streams.redis_read import RedisReader, Tailer, open_reader
from app.streams.store import StreamStore, due, new_stream_id, unknown
from app.streams.stream import ProblemOf, Stream

MAX_BATCH_BYTES = 256 * 1024
HEARTBEAT_S = 0.5
OUTAGE_NOTICED_S = 1.0
"""If heartbeats are further apart, Redis was away, and the streams' readers get their full time again."""
ENDED_S = 30.0
"""How long ended streams are remembered: a failover of Redis loses only events that were written shortly before it."""
OWNER_MS = 4_000
"""How long a heartbeat is valid, in milliseconds."""
MAX_UNPUBLISHED_BYTES = 4 * 1024 * 1024
"""Limit of a stream's events that are not yet in Redis."""
LAST_EVENTS_S = 2.0
"""Time limit at shutdown for publishing the last events of ended streams."""

_log = logging.getLogger(__name__)


class StreamLost(Exception):
    """The stream in Redis cannot be written any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Owned(KeptStream):
    """A stream of this process, until its keys are gone from Redis. ``read_at``: time of the last known reader."""

    resume_s: float
    stream: Stream | None
    """None when its events are in Redis."""
    read_at: float = field(default_factory=time.monotonic)
    sizes: deque[tuple[int, int]] = field(default_factory=deque)
    """Id and size of each event in Redis."""
    total: int = 0

    def drop_oldest(self, count: int = 1) -> None:
        for _ in range(count):
            self.total -= self.sizes.popleft()[1]

    def cause_of_end(self, me: str, owner: bytes | None) -> StreamCancelled | None:
        """Why the running stream must end, if it must. ``owner``: as Redis has it."""
        if owner is None:
            return StreamCancelled("The stream was cancelled with DELETE.")
        if owner != me.encode():
            return StreamCancelled("The stream was ended because this process missed its heartbeats.")
        if time.monotonic() - self.read_at > self.resume_s:
            return StreamCancelled(f"No client read the stream for {self.resume_s:g} s.")
        return None


def batches_of(events: list[Event]) -> Iterator[list[Event]]:
    """Yields batches of at most MAX_BATCH_BYTES, or of one larger event."""
    batch, room = list[Event](), MAX_BATCH_BYTES
    for event in events:
        if batch and event.size > room:
            yield batch
            batch, room = [], MAX_BATCH_BYTES
        batch.append(event)
        room -= event.size
    yield batch


class RedisStore(StreamStore):
    """An ended stream is looked at when it should have expired: another process that reads it renews its keys."""

    def __init__(self, url: str, problem_of: ProblemOf, limits: KeepLimits = KEEP_LIMITS) -> None:
        super().__init__(limits)
        self._connections = Connections(url)
        self.notes = RedisNotes(self._connections.requests)
        self._owner = secrets.token_hex(8)
        self._beat_at = time.monotonic()
        """Time of the last heartbeat that Redis answered."""
        self._tailer = Tailer(self._connections.tail, self._owner, problem_of)
        self._streams: dict[str, _Owned] = {}
        """Those of this process."""
        self._publishing: set[asyncio.Task[None]] = set()
        self._disowned: set[str] = set()
        """Streams that ended without a terminal event in Redis; readers may write it."""
        self._ended: dict[str, float] = {}
        """When each stream that ended shortly ago had its terminal event written, on the monotonic clock."""

    def new_log(self) -> EventLog:
        return LiveLog(MAX_UNPUBLISHED_BYTES)

    async def require_room(self, caller: str) -> None:
        """Also rejects at once while Redis has not answered the last heartbeats, and later after ANSWER_S."""
        if time.monotonic() - self._beat_at > HEARTBEAT_S + ANSWER_S:
            raise UpstreamUnavailable(UNAVAILABLE)
        async with redis_errors(ANSWER_S):
            await self._connections.requests.ping()
            await super().require_room(caller)

    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        stream_id = new_stream_id()
        key, resume_ms = keys_of(stream_id).stream, round(resume_s * 1e3)
        known = {"owner": self._owner, "request_id": stream.request_id, "resume_ms": resume_ms, "caller": caller}
        owned = _Owned(stream_id, caller, resume_s=resume_s, stream=stream)
        async with redis_errors(ANSWER_S), self._connections.requests.pipeline(transaction=True) as pipe:
            await super().require_room(caller)
            self._quota.add(owned)
            try:
                await pipe.hset(key, mapping=known).pexpire(key, lifetime_ms(resume_s)).execute()
            except BaseException:
                self._quota.remove(owned)
                self._disowned.add(stream_id)  # Redis may have written it, but nothing runs it
                raise
        self._streams[stream_id] = owned
        task = asyncio.create_task(self._publish_all(owned, stream))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)
        return stream_id

    async def reader(self, stream_id: str, after: int = 0) -> RedisReader | None:
        return await open_reader(self._connections.requests, self._tailer, stream_id, after)

    async def caller_of(self, stream_id: str) -> str:
        async with redis_errors():
            fields = ["owner", "caller", "evicted"]
            owner, caller, is_evicted = await self._connections.requests.hmget(keys_of(stream_id).stream, fields)
        if is_evicted:
            raise evicted()
        if owner is None:
            raise unknown()
        return (caller or b"").decode(errors="replace")

    async def delete(self, stream_id: str) -> None:
        """The owner notices the deletion within HEARTBEAT_S; open readers still get the terminal event."""
        key = keys_of(stream_id).stream
        async with redis_errors(), self._connections.requests.pipeline(transaction=True) as pipe:
            is_evicted, is_deleted = await pipe.hexists(key, "evicted").delete(key).execute()
        if is_evicted:
            raise evicted()
        if not is_deleted:
            raise unknown()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._tailer.run())

    async def __aexit__(self, *_: object) -> None:
        """Publishes the rest of ended streams, then removes this process's heartbeat."""
        publishing = set(self._publishing)
        if publishing:
            await asyncio.wait(publishing, timeout=LAST_EVENTS_S)
            for task in publishing:
                task.cancel()
            await asyncio.wait(publishing)
        with suppress(RedisError, OSError):
            await self._connections.heartbeat.delete(owner_key(self._owner))
        await self._connections.close()

    async def _publish_all(self, owned: _Owned, stream: Stream) -> None:
        """A failure ends only this stream: with an error here, and for readers as if the owner had died."""
        after, has_ended = 0, False
        try:
            while not has_ended:
                events = await stream.log.read(after)
                for batch in batches_of(events):
                    await self._publish(owned, stream, batch)
                after, has_ended = events[-1].id, events[-1].is_terminal
            self._ended[owned.id] = time.monotonic()
        except StreamLost:
            self._disowned.add(owned.id)
            stream.end(StreamCancelled("The store lost the stream, so no client can read it."))
        except Exception:
            self._disowned.add(owned.id)
            _log.exception("publishing a stream failed", extra={"request_id": stream.request_id})
            stream.end(Internal("The gateway failed. Its log shows the cause under the request's id."))
        finally:
            owned.stream = None
            owned.sizes.clear()
            owned.due_at = time.monotonic() + lifetime_ms(owned.resume_s) / 1e3
            self._quota.mark(owned, evictable=True)

    async def _publish(self, owned: _Owned, stream: Stream, batch: list[Event]) -> None:
        """Retries while Redis is unavailable, but only briefly if the model waits, because Triton buffers responses.

        Drops the oldest events that do not fit into the limit of the stream or of the process. Raises StreamLost.
        """
        before = owned.total
        owned.sizes.extend((event.id, event.size + EVENT_BYTES) for event in batch)
        owned.total += sum(event.size + EVENT_BYTES for event in batch)
        while owned.total > MAX_REPLAY_BYTES and len(owned.sizes) > 1 + batch[-1].is_terminal:
            owned.drop_oldest()
        with suppress(RedisError, OSError):
            while not await self._make_room(owned.caller, size=owned.total - before) and len(owned.sizes) > 1:
                owned.drop_oldest(len(owned.sizes) // 2)
        self._quota.grow(owned, owned.total - before)
        words = (lifetime_ms(owned.resume_s), owned.sizes[0][0], *(word for event in batch for word in event))
        keys, started = keys_of(owned.id), time.monotonic()
        while True:
            try:
                is_written = await self._connections.publish.eval(PUBLISH, 2, keys.events, keys.stream, *words)
                break
            except (RedisError, OSError) as exc:
                if time.monotonic() - started > (STALL_S if stream.log.is_full else OUTAGE_S):
                    raise StreamLost from exc
                await asyncio.sleep(RETRY_PAUSE_S)
        if not is_written:
            raise StreamLost

    async def _watch(self) -> None:
        is_away = False
        while True:
            try:
                await self._heartbeat()
                if is_away:
                    _log.info("Redis at %s answers again", self._connections.address)
                is_away = False
            except (RedisError, OSError) as exc:
                if not is_away:
                    text = "Redis at %s does not answer; until it does, /v1/streams answers 503"
                    error = type(exc.__cause__ or exc).__name__
                    _log.warning(text, self._connections.address, extra={"error": error})
                is_away = True
            await asyncio.sleep(RETRY_PAUSE_S if is_away else HEARTBEAT_S)

    async def _heartbeat(self) -> None:
        """Renews the heartbeat and the expiry of the streams, and ends streams that were deleted or have no reader."""
        await self._connections.heartbeat.set(owner_key(self._owner), 1, px=OWNER_MS)
        now = time.monotonic()
        running = [owned for owned in self._streams.values() if owned.stream is not None]
        if now - self._beat_at > OUTAGE_NOTICED_S:
            # No client could read meanwhile. It may have been a failover that lost terminal events: readers may write
            # them again.
            for owned in running:
                owned.read_at = now
            self._disowned |= self._ended.keys()
        self._ended = {stream_id: at for stream_id, at in self._ended.items() if now - at < ENDED_S}
        self._beat_at = now
        for batch in batches(running + due(self._streams.values())):
            await self._look_at(batch)
        for disowned in batches(list(self._disowned)):
            async with self._connections.heartbeat.pipeline(transaction=False) as pipe:
                for stream_id in disowned:
                    pipe.eval(DISOWN, 1, keys_of(stream_id).stream)
                await pipe.execute()
            self._disowned.difference_update(disowned)

    async def _look_at(self, batch: Sequence[_Owned]) -> None:
        """Running streams, and ended ones that are due."""
        async with self._connections.heartbeat.pipeline(transaction=False) as pipe:
            for owned in batch:
                keys = keys_of(owned.id)
                pipe.hget(keys.stream, "owner").exists(keys.readers).pttl(keys.events)
            for owned in batch:
                if owned.stream is not None:
                    keys, lifetime = keys_of(owned.id), lifetime_ms(owned.resume_s)
                    pipe.pexpire(keys.stream, lifetime).pexpire(keys.events, lifetime)
            seen: list[Any] = await pipe.execute()
        now = time.monotonic()
        for owned, owner, has_reader, left_ms in zip(batch, seen[0::3], seen[1::3], seen[2::3], strict=False):
            if owned.stream is not None:
                owned.read_at = now if has_reader else owned.read_at
                if (cause := owned.cause_of_end(self._owner, owner)) is not None:
                    owned.stream.end(cause)
            elif left_ms <= 0:
                self._remove(owned)
            elif owned.id in self._streams:
                self._quota.mark(owned, evictable=not has_reader)
                owned.due_at = now + (PRESENCE_MS if has_reader else left_ms) / 1e3

    async def _evict(self, victim: KeptStream) -> None:
        """Raises redis-py's errors."""
        self._quota.mark(victim, evictable=False)
        keys = keys_of(victim.id)
        if await self._connections.requests.eval(EVICT, 3, keys.events, keys.stream, keys.readers):
            self._remove(victim)
        else:
            victim.due_at = time.monotonic() + PRESENCE_MS / 1e3

    def _remove(self, kept: KeptStream) -> None:
        if self._streams.pop(kept.id, None) is not None:
            self._quota.remove(kept)
