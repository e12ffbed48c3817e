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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from app.core.errors import Internal, StreamCancelled, UnknownStream, UpstreamUnavailable
from app.core.repeats import RepeatKey, Repeats
from app.streams.events import EVENT_BYTES, MAX_REPLAY_BYTES, STALL_S, Event, EventLog, LiveLog
from app.streams.quota import KEEP_LIMITS, KeepLimits, KeptStream, evicted
from app.streams.redis_client import (
    ANSWER_S,
    CLAIM,
    DISOWN,
    EVICT,
    OUTAGE_S,
    PREFIX,
    PRESENCE_MS,
    PUBLISH,
    RELEASE,
    RETRY_PAUSE_S,
    UNAVAILABLE,
    Connections,
    RedisClient,
    batches,
    keys_of,
    lifetime_ms,
    owner_key,
    redis_errors,
    start_key,
)
from app.streams.redis_read import RedisReader, Tailer
from app.streams.store import StartedStream, StreamStore, new_stream_id
from app.streams.stream import ProblemOf, Stream

MAX_BATCH_BYTES = 256 * 1024


class StreamLost(Exception):
    """The stream in Redis cannot be written any more."""


CLAIM_MS = 10_000
"""Lifetime of a claim. Its process renews it until the stream is started; a claim of which no process knows expires."""


class RedisStarts(Repeats[StartedStream]):
    """``owner``: the name of this process."""

    def __init__(self, redis: RedisClient, owner: str) -> None:
        self._redis = redis
        self._owner = owner
        self._claims: set[str] = set()
        """The keys in Redis of the claims whose streams are not started yet."""

    async def release(self, start: RepeatKey) -> None:
        self.settle(start)
        async with redis_errors(ANSWER_S):
            await self._redis.eval(RELEASE, 1, start_key(start), self._owner)

    def settle(self, start: RepeatKey) -> None:
        """Called when the stream was started: its process renews the key with the stream."""
        self._claims.discard(start_key(start))

    async def renew(self, heartbeat: RedisClient) -> None:
        """Call this with each heartbeat. Raises redis-py's errors."""
        for key in list(self._claims):
            await heartbeat.pexpire(key, CLAIM_MS)

    async def _claimed(self, start: RepeatKey) -> tuple[str, StartedStream | None] | None:
        """If the client disconnects in the meantime, a claim that Redis has made is released."""
        claiming = asyncio.create_task(self._claim(start))
        try:
            found = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.wait([claiming])
            if claiming.exception() is None and not claiming.result():
                await self.release(start)
            raise
        if not found:
            self._claims.add(start_key(start))
            return None
        digest, *stream = (each.decode() for each in found)
        return digest, StartedStream(*stream) if stream else None

    async def _claim(self, start: RepeatKey) -> list[bytes]:
        async with redis_errors(ANSWER_S):
            found: list[bytes] = await self._redis.eval(
                CLAIM, 1, start_key(start), PREFIX, start.digest, self._owner, CLAIM_MS
            )
        return found


class Publisher:
    """Writes the events of one stream of this process to Redis.

    ``start_key``: the key in Redis of its idempotency key, or empty. ``read_at``: time of the last known reader, on
    the monotonic clock.
    """

    def __init__(
        self,
        stream: Stream,
        grow: Callable[[KeptStream, int], Awaitable[bool]],
        kept: KeptStream,
        resume_s: float,
        start_key: str,
    ) -> None:
        self.stream = stream
        self.start_key = start_key
        self.kept = kept
        self.keys = keys_of(kept.id)
        self._grow = grow
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
        words = (lifetime_ms(self.resume_s), self._sizes[0][0], *(word for event in batch for word in event))
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
            while not await self._grow(self.kept, self._total - before) and len(self._sizes) > 1:
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
OWNER_MS = 4_000
"""How long a heartbeat is valid, in milliseconds."""
MAX_UNPUBLISHED_BYTES = 4 * 1024 * 1024
"""Limit of a stream's events that are not yet in Redis."""
LAST_EVENTS_S = 2.0
"""Time limit at shutdown for publishing the last events of ended streams."""

_log = logging.getLogger(__name__)


class RedisStore(StreamStore):
    """An ended stream is looked at when it should have expired: another process that reads it renews its keys."""

    def __init__(self, url: str, problem_of: ProblemOf, limits: KeepLimits = KEEP_LIMITS) -> None:
        self._connections = Connections(url)
        self._owner = secrets.token_hex(8)
        self._beat_at = time.monotonic()
        """Time of the last heartbeat that Redis answered."""
        self._tailer = Tailer(self._connections.tail, self._owner, problem_of)
        self._starts = RedisStarts(self._connections.requests, self._owner)
        super().__init__(limits, self._starts)
        self._kept: dict[str, KeptStream] = {}
        """The ended streams of this process, until their keys are gone from Redis."""
        self._owned: dict[str, Publisher] = {}
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

    async def keep(self, stream: Stream, resume_s: float, caller: str = "", start: RepeatKey | None = None) -> str:
        stream_id = new_stream_id()
        keys, key = keys_of(stream_id), "" if start is None else start_key(start)
        known = {
            "owner": self._owner,
            "request_id": stream.request_id,
            "resume_ms": round(resume_s * 1e3),
            "caller": caller,
            "start": key,
        }
        async with redis_errors(ANSWER_S), self._connections.requests.pipeline(transaction=True) as pipe:
            await super().require_room(caller)
            pipe.hset(keys.stream, mapping=known).pexpire(keys.stream, lifetime_ms(resume_s))
            if key:
                pipe.hset(key, "stream", stream_id).pexpire(key, lifetime_ms(resume_s))
            try:
                await pipe.execute()
            except BaseException:
                self._disowned.add(stream_id)  # Redis may have written it, but nothing runs it
                raise
        kept = KeptStream(stream_id, caller)
        self._quota.add(kept)
        self._owned[stream_id] = publisher = Publisher(stream, self._grow, kept, resume_s, key)
        if start is not None:
            self._starts.settle(start)
        task = asyncio.create_task(self._publish(stream_id, publisher))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)
        return stream_id

    async def reader(self, stream_id: str) -> RedisReader:
        return await RedisReader(self._connections.requests, self._tailer, keys_of(stream_id)).open()

    async def caller_of(self, stream_id: str) -> str:
        async with redis_errors():
            owner, caller = await self._connections.requests.hmget(keys_of(stream_id).stream, ["owner", "caller"])
        if owner is None:
            raise UnknownStream("There is no such stream, or it has expired.")
        return (caller or b"").decode(errors="replace")

    async def delete(self, stream_id: str) -> None:
        """The owner notices the deletion within HEARTBEAT_S; open readers still get the terminal event."""
        key = keys_of(stream_id).stream
        async with redis_errors(), self._connections.requests.pipeline(transaction=True) as pipe:
            is_evicted, is_deleted = await pipe.hexists(key, "evicted").delete(key).execute()
        if is_evicted:
            raise evicted()
        if not is_deleted:
            raise UnknownStream("There is no such stream, or it has expired.")

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
            self._kept[stream_id] = publisher.kept
            self._quota.mark(publisher.kept, evictable=True)
            self._agenda.set(stream_id, lifetime_ms(publisher.resume_s) / 1e3)

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
        if now - self._beat_at > OUTAGE_NOTICED_S:
            # No client could read meanwhile. It may have been a failover that lost terminal events: readers may write
            # them again.
            for owned in self._owned.values():
                owned.read_at = now
            self._disowned |= self._ended.keys()
        self._ended = {stream_id: at for stream_id, at in self._ended.items() if now - at < ENDED_S}
        self._beat_at = now
        for batch in batches(list(self._owned.values())):
            await self._check(batch)
        for disowned in batches(list(self._disowned)):
            async with self._connections.heartbeat.pipeline(transaction=False) as pipe:
                for stream_id in disowned:
                    pipe.eval(DISOWN, 1, keys_of(stream_id).stream)
                await pipe.execute()
            self._disowned.difference_update(disowned)
        await self._starts.renew(self._connections.heartbeat)
        for kept in batches([self._kept[each] for each in self._agenda.due() if each in self._kept]):
            await self._look_at(kept)

    async def _check(self, owned: Sequence[Publisher]) -> None:
        async with self._connections.heartbeat.pipeline(transaction=False) as pipe:
            for each in owned:
                keys, lifetime = each.keys, lifetime_ms(each.resume_s)
                pipe.hget(keys.stream, "owner").exists(keys.readers)
                pipe.pexpire(keys.stream, lifetime).pexpire(keys.events, lifetime)
                pipe.pexpire(each.start_key or keys.stream, lifetime)
            seen: list[Any] = await pipe.execute()
        now = time.monotonic()
        for each, owner, has_reader in zip(owned, seen[::5], seen[1::5], strict=True):
            if has_reader:
                each.read_at = now
            if owner is None:
                each.stream.end(StreamCancelled("The stream was cancelled with DELETE."))
            elif owner != self._owner.encode():
                each.stream.end(StreamCancelled("The stream was ended because this process missed its heartbeats."))
            elif now - each.read_at > each.resume_s:
                each.stream.end(StreamCancelled(f"No client read the stream for {each.resume_s:g} s."))

    async def _grow(self, kept: KeptStream, size: int) -> bool:
        """Accounts for events. Returns whether there is room for them. Raises redis-py's errors."""
        self._quota.grow(kept, size)
        return await self._make_room(kept.caller)

    async def _evict(self, victim: KeptStream) -> None:
        """Raises redis-py's errors."""
        self._quota.mark(victim, evictable=False)
        keys = keys_of(victim.id)
        if await self._connections.requests.eval(EVICT, 3, keys.events, keys.stream, keys.readers):
            self._remove(victim)
        else:
            self._agenda.set(victim.id, PRESENCE_MS / 1e3)

    async def _look_at(self, batch: Sequence[KeptStream]) -> None:
        async with self._connections.requests.pipeline(transaction=False) as pipe:
            for kept in batch:
                keys = keys_of(kept.id)
                pipe.pttl(keys.events).exists(keys.readers)
            seen: list[Any] = await pipe.execute()
        for kept, left_ms, has_reader in zip(batch, seen[::2], seen[1::2], strict=True):
            if left_ms <= 0:
                self._remove(kept)
            elif kept.id in self._kept:
                self._quota.mark(kept, evictable=not has_reader)
                self._agenda.set(kept.id, PRESENCE_MS / 1e3 if has_reader else left_ms / 1e3)

    def _remove(self, kept: KeptStream) -> None:
        if self._kept.pop(kept.id, None) is not None:
            self._quota.remove(kept)
