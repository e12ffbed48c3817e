"""Stores streams in Redis: a stream runs in the process that started it; any process can read and delete it.

The process that runs a stream, its owner, publishes the events to a Redis Stream. Each owner sends a heartbeat, which
also checks which of its streams have readers and which were deleted. If an owner died, a reader writes the terminal
event of its streams, so that every stream has one.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from asyncio import timeout
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from redis.exceptions import RedisError

from app.core.errors import Internal, StreamCancelled, UnknownStream, UpstreamUnavailable
from app.core.redis_pool import RedisClient, batches
from app.streams.events import EVENT_BYTES, MAX_REPLAY_BYTES, STALL_S, Event, EventLog, LiveLog
from app.streams.quota import KEEP_LIMITS, KeepLimits, KeptStream, Usage, evicted
from app.streams.redis_client import (
    DISOWN,
    OUTAGE_S,
    PUBLISH,
    RETRY_PAUSE_S,
    UNAVAILABLE,
    Connections,
    keys_of,
    lifetime_ms,
    owner_key,
    redis_errors,
    script_words,
)
from app.streams.redis_quota import KeptInRedis
from app.streams.redis_read import RedisReader, Tailer
from app.streams.redis_starts import RedisStarts, start_key
from app.streams.store import StartedStream, StartKey, new_stream_id
from app.streams.stream import ProblemOf, Stream

MAX_BATCH_BYTES = 256 * 1024


class StreamLost(Exception):
    """The stream in Redis cannot be written any more."""


class Publisher:
    """Writes the events of one stream of this process to Redis.

    ``read_at``: time of the last known reader, on the monotonic clock.
    """

    def __init__(
        self,
        stream: Stream,
        room: KeptInRedis,
        kept: KeptStream,
        resume_s: float,
    ) -> None:
        self.stream = stream
        self.start_key = ""
        """The key in Redis of the stream's idempotency key; empty without one."""
        self.kept = kept
        self.keys = keys_of(kept.id)
        self._room = room
        self.resume_s = resume_s
        self.read_at = time.monotonic()
        self._sizes: deque[tuple[int, int]] = deque()
        """Id and size of each event in Redis."""
        self._total = 0

    async def publish(self, redis: RedisClient) -> None:
        """Publishes the events up to the terminal event. Raises StreamLost."""
        after = 0
        while True:
            events = await self.stream.log.read(after)
            for batch in batches_of(events):
                await self._write(redis, batch)
            after = events[-1].id
            if events[-1].is_terminal:
                return

    async def _write(self, redis: RedisClient, batch: list[Event]) -> None:
        """Retries while Redis is unavailable, but only briefly if the model waits, because Triton buffers responses.

        Raises StreamLost.
        """
        await self._account_for(batch)
        words = (lifetime_ms(self.resume_s), self._sizes[0][0], *script_words(batch))
        started = time.monotonic()
        ends, ends_if_full = started + OUTAGE_S, started + STALL_S
        while True:
            try:
                is_written = await redis.eval(PUBLISH, 2, self.keys.events, self.keys.stream, *words)
                break
            except (RedisError, OSError) as exc:
                if time.monotonic() > (ends_if_full if self.stream.log.is_full else ends):
                    raise StreamLost from exc
                await asyncio.sleep(RETRY_PAUSE_S)
        if not is_written:
            raise StreamLost

    async def _account_for(self, events: list[Event]) -> None:
        """Notes new events, and drops the oldest ones that do not fit into the stream's or the process's limit."""
        before = self._total
        self._sizes.extend((event.id, event.size + EVENT_BYTES) for event in events)
        self._total += sum(event.size + EVENT_BYTES for event in events)
        least = 1 + events[-1].is_terminal
        while self._total > MAX_REPLAY_BYTES and len(self._sizes) > least:
            self._drop_oldest()
        with suppress(RedisError, OSError):
            while not await self._room.grow(self.kept, self._total - before) and len(self._sizes) > 1:
                before = self._total
                for _ in range(len(self._sizes) // 2):
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._total -= self._sizes.popleft()[1]


def batches_of(events: list[Event]) -> list[list[Event]]:
    """Returns batches of at most MAX_BATCH_BYTES, or of one larger event."""
    batches: list[list[Event]] = []
    room = 0
    for event in events:
        if not batches or event.size > room:
            batches.append([])
            room = MAX_BATCH_BYTES
        batches[-1].append(event)
        room -= event.size
    return batches


HEARTBEAT_S = 0.5
OUTAGE_NOTICED_S = 1.0
"""If heartbeats are further apart, Redis was away, and the streams' readers get their full time again."""
ENDED_S = 30.0
"""How long ended streams are remembered: a failover of Redis loses only events that were written shortly before it."""
KEEP_S = 2.0
"""Time limit for Redis when a stream starts."""
OWNER_MS = 4_000
"""How long a heartbeat is valid, in milliseconds."""
MAX_UNPUBLISHED_BYTES = 4 * 1024 * 1024
"""Limit of a stream's events that are not yet in Redis."""
LAST_EVENTS_S = 2.0
"""Time limit at shutdown for publishing the last events of ended streams."""

_log = logging.getLogger(__name__)


class RedisStore:
    """Implements :class:`app.streams.store.StreamStore`."""

    def __init__(self, url: str, problem_of: ProblemOf, limits: KeepLimits = KEEP_LIMITS) -> None:
        self._connections = Connections(url)
        self._owner = secrets.token_hex(8)
        self._beat_at = time.monotonic()
        """Time of the last heartbeat that Redis answered."""
        self._tailer = Tailer(self._connections.tail, self._owner, problem_of)
        self._room = KeptInRedis(self._connections.requests, limits)
        self._starts = RedisStarts(self._connections.requests, self._owner)
        self._owned: dict[str, Publisher] = {}
        self._publishing: set[asyncio.Task[None]] = set()
        self._disowned: set[str] = set()
        """Streams that ended without a terminal event in Redis; readers may write it."""
        self._ended: dict[str, float] = {}
        """When each stream that ended shortly ago had its terminal event written, on the monotonic clock."""

    @property
    def usage(self) -> Usage:
        return self._room.usage

    def new_log(self) -> EventLog:
        return LiveLog(MAX_UNPUBLISHED_BYTES)

    async def require_room(self, caller: str) -> None:
        """Also rejects at once while Redis has not answered the last heartbeats, and after KEEP_S without an answer."""
        if time.monotonic() - self._beat_at > HEARTBEAT_S + KEEP_S:
            raise UpstreamUnavailable(UNAVAILABLE)
        with redis_errors():
            async with timeout(KEEP_S):
                await self._connections.requests.ping()
                await self._room.make_room_for_stream(caller)

    async def claim(self, start: StartKey) -> StartedStream | None:
        return await self._starts.claim(start)

    async def release(self, start: StartKey) -> None:
        await self._starts.release(start)

    async def keep(self, stream: Stream, resume_s: float, caller: str = "", start: StartKey | None = None) -> str:
        stream_id = new_stream_id()
        keys, key = keys_of(stream_id), "" if start is None else start_key(start)
        known = {
            "owner": self._owner,
            "request_id": stream.request_id,
            "resume_ms": round(resume_s * 1e3),
            "caller": caller,
            "start": key,
        }
        with redis_errors():
            async with timeout(KEEP_S), self._connections.requests.pipeline(transaction=True) as pipe:
                await self._room.make_room_for_stream(caller)
                pipe.hset(keys.stream, mapping=known).pexpire(keys.stream, lifetime_ms(resume_s))
                if key:
                    pipe.hset(key, "stream", stream_id).pexpire(key, lifetime_ms(resume_s))
                try:
                    await pipe.execute()
                except BaseException:
                    self._disowned.add(stream_id)  # Redis may have written it, but nothing runs it
                    raise
        self._owned[stream_id] = publisher = Publisher(stream, self._room, self._room.add(stream_id, caller), resume_s)
        publisher.start_key = key
        if start is not None:
            self._starts.settle(start)
        task = asyncio.create_task(self._publish(stream_id, publisher))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)
        return stream_id

    async def reader(self, stream_id: str) -> RedisReader:
        return await RedisReader.open(self._connections.requests, self._tailer, keys_of(stream_id))

    async def caller_of(self, stream_id: str) -> str:
        with redis_errors():
            owner, caller = await self._connections.requests.hmget(keys_of(stream_id).stream, ["owner", "caller"])
        if owner is None:
            raise UnknownStream("There is no such stream, or it has expired.")
        return (caller or b"").decode(errors="replace")

    async def delete(self, stream_id: str) -> None:
        """The owner notices the deletion within HEARTBEAT_S; open readers still get the terminal event."""
        key = keys_of(stream_id).stream
        with redis_errors():
            async with self._connections.requests.pipeline(transaction=True) as pipe:
                is_evicted, is_deleted = await pipe.hexists(key, "evicted").delete(key).execute()
        if is_evicted:
            raise evicted()
        if not is_deleted:
            raise UnknownStream("There is no such stream, or it has expired.")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._tailer.run())

    async def __aenter__(self) -> Self:
        """Does not wait for Redis: without it, the gateway serves everything but resumable streams."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Publishes the rest of ended streams, then removes this process's heartbeat."""
        publishing = set(self._publishing)
        if publishing:
            await asyncio.wait(publishing, timeout=LAST_EVENTS_S)
            for task in publishing:
                task.cancel()
            await asyncio.wait(publishing)
        with contextlib.suppress(RedisError, OSError):
            await self._connections.heartbeat.delete(owner_key(self._owner))
        await self._connections.close()

    async def _publish(self, stream_id: str, publisher: Publisher) -> None:
        """A failure ends only this stream: with an error here, and for readers as if the owner had died."""
        try:
            await publisher.publish(self._connections.publish)
            self._ended[stream_id] = time.monotonic()
        except StreamLost:
            self._disowned.add(stream_id)
            publisher.stream.end(StreamCancelled("The store lost the stream, so no client can read it."))
        except Exception:
            self._disowned.add(stream_id)
            _log.exception("publishing a stream failed", extra={"request_id": publisher.stream.request_id})
            publisher.stream.end(Internal("The gateway failed. Its log shows the cause under the request's id."))
        finally:
            del self._owned[stream_id]
            self._room.ended(publisher.kept, lifetime_ms(publisher.resume_s) / 1e3)

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
        self._note_heartbeat(time.monotonic())
        for batch in batches(list(self._owned.values())):
            await self._check(batch)
        for disowned in batches(list(self._disowned)):
            await self._disown(disowned)
        await self._starts.renew(self._connections.heartbeat)
        await self._room.refresh()

    async def _disown(self, stream_ids: Sequence[str]) -> None:
        async with self._connections.heartbeat.pipeline(transaction=False) as pipe:
            for stream_id in stream_ids:
                pipe.eval(DISOWN, 1, keys_of(stream_id).stream)
            await pipe.execute()
        self._disowned.difference_update(stream_ids)

    def _note_heartbeat(self, now: float) -> None:
        """After an outage no stream counts as unread, because no client could read it.

        The outage may have been a failover that lost terminal events: readers may write them again.
        """
        if now - self._beat_at > OUTAGE_NOTICED_S:
            for owned in self._owned.values():
                owned.read_at = now
            self._disowned |= self._ended.keys()
        self._ended = {stream_id: at for stream_id, at in self._ended.items() if now - at < ENDED_S}
        self._beat_at = now

    async def _check(self, owned: Sequence[Publisher]) -> None:
        async with self._connections.heartbeat.pipeline(transaction=False) as pipe:
            for each in owned:
                keys, lifetime = each.keys, lifetime_ms(each.resume_s)
                pipe.hget(keys.stream, "owner").exists(keys.readers)
                pipe.pexpire(keys.stream, lifetime).pexpire(keys.events, lifetime)
                pipe.pexpire(each.start_key or keys.stream, lifetime)
            seen: list[Any] = await pipe.execute()
        for each, owner, has_reader in zip(owned, seen[::5], seen[1::5], strict=True):
            self._end_if_unwanted(each, owner=owner, has_reader=bool(has_reader))

    def _end_if_unwanted(self, owned: Publisher, *, owner: bytes | None, has_reader: bool) -> None:
        now = time.monotonic()
        if has_reader:
            owned.read_at = now
        if owner is None:
            owned.stream.end(StreamCancelled("The stream was cancelled with DELETE."))
        elif owner != self._owner.encode():
            owned.stream.end(StreamCancelled("The stream was ended because this process missed its heartbeats."))
        elif now - owned.read_at > owned.resume_s:
            owned.stream.end(StreamCancelled(f"No client read the stream for {owned.resume_s:g} s."))
