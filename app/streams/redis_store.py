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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from app.core.aio import BackgroundTasks
from app.core.errors import Internal, StreamCancelled, UnknownStream
from app.streams.redis_read import (
    APPEND,
    LEASE_MS,
    OUTAGE_S,
    PREFIX,
    PRESENCE_MS,
    RETRY_PAUSE_S,
    Keys,
    Tailer,
    batches,
    check_known,
    client_of,
    redis_errors,
)
from app.streams.store import KEEP_LIMITS, UNKNOWN, KeepLimits, KeptStream, Reader, StreamStore, new_stream_id
from app.streams.stream import EVENT_BYTES, MAX_REPLAY_BYTES, STALL_S, Event, EventLog, LiveLog, ProblemOf, Stream

REQUEST_CONNECTIONS = 8
PUBLISH_CONNECTIONS = 16
ANSWER_S = 2.0
"""Time limit for Redis when a stream starts."""
HEARTBEAT_S = 0.5
OUTAGE_NOTICED_S = 1.0
"""If heartbeats are further apart, Redis was away, and the streams' readers get their full time again."""
ENDED_S = 30.0
"""A failover of Redis loses only events that were written shortly before it, at most this long."""
OWNER_MS = 4_000
"""How long a heartbeat is valid, in milliseconds."""
MAX_UNPUBLISHED_BYTES = 4 * 1024 * 1024
"""Limit of a stream's events that are not yet in Redis."""
LAST_EVENTS_S = 2.0
"""Time limit at shutdown for publishing the last events of ended streams."""

DISOWN = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'owner', '') end"
"""Marks that the owner writes no further events, so that a reader may write the terminal event."""
EVICT = """
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
redis.call('DEL', KEYS[1])
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'evicted', 1) end
return 1
"""
"""Drops the events of an ended stream. Returns 0 if the stream has a reader, and does nothing then."""
REPLACE_NOTE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
"""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _Owned(KeptStream):
    """A stream of this process, until its keys are gone from Redis."""

    read_at: float = field(default_factory=time.monotonic)
    """Time of the last known reader; of an ended stream the time of its end."""
    is_disowned: bool = False
    """Whether it may have ended without a terminal event in Redis, so that readers may write it."""

    @property
    def lifetime_ms(self) -> int:
        return round(self.resume_s * 1e3) + LEASE_MS


class RedisStore(StreamStore):
    """An ended stream is looked at when it should have expired: another process that reads it renews its keys."""

    is_shared = True

    def __init__(self, url: str, problem_of: ProblemOf, limits: KeepLimits = KEEP_LIMITS) -> None:
        super().__init__(limits)
        parts = urlsplit(url)
        self._address = parts.netloc.rpartition("@")[2] or parts.path
        # Each kind of work has its own connections, which all streams and readers share.
        self._requests, self._publisher = client_of(url, REQUEST_CONNECTIONS), client_of(url, PUBLISH_CONNECTIONS)
        self._heart, self._tail = client_of(url, 1), client_of(url, 1)
        self._owner = secrets.token_hex(8)
        self._owner_key = f"{PREFIX}:owner:{self._owner}"
        self._beat_at = time.monotonic()
        """Time of the last heartbeat that Redis answered."""
        self._tailer = Tailer(self._tail, self._requests, self._owner, problem_of)
        self._streams: dict[str, _Owned] = {}
        """The streams of this process."""
        self._publishing = BackgroundTasks()

    def new_log(self) -> EventLog:
        return LiveLog(MAX_UNPUBLISHED_BYTES)

    async def require_room(self, caller: str) -> None:
        """Also rejects at once while Redis has not answered the last heartbeats, and later after ANSWER_S."""
        async with redis_errors(ANSWER_S):
            if time.monotonic() - self._beat_at > HEARTBEAT_S + ANSWER_S:
                raise TimeoutError
            await self._requests.ping()
            await super().require_room(caller)

    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        owned = _Owned(new_stream_id(), caller, resume_s, stream)
        key, resume_ms = Keys(owned.id).stream, round(resume_s * 1e3)
        known = {"owner": self._owner, "request_id": stream.request_id, "resume_ms": resume_ms, "caller": caller}
        async with redis_errors(ANSWER_S), self._requests.pipeline(transaction=True) as pipe:
            await super().require_room(caller)
            self._quota.add(owned)
            try:
                await pipe.hset(key, mapping=known).pexpire(key, owned.lifetime_ms).execute()
            except BaseException:
                self._quota.remove(owned)
                raise
        self._streams[owned.id] = owned
        self._publishing.start(self._publish_all(owned, stream))
        return owned.id

    async def reader(self, stream_id: str, after: int = 0) -> Reader | None:
        return await self._tailer.reader(stream_id, after)

    async def caller_of(self, stream_id: str) -> str:
        async with redis_errors():
            known = await self._requests.hgetall(Keys(stream_id).stream)
        check_known(known)
        return str(known.get(b"caller", b""), errors="replace")

    async def delete(self, stream_id: str) -> None:
        """The owner notices the deletion within HEARTBEAT_S; open readers still get the terminal event."""
        await self.caller_of(stream_id)
        async with redis_errors():
            if not await self._requests.delete(Keys(stream_id).stream):
                raise UnknownStream(UNKNOWN)

    async def claim_note(self, name: str, note: bytes, keep_s: float) -> bytes | None:
        key = f"{PREFIX}:note:{name}"
        async with redis_errors(ANSWER_S), self._requests.pipeline(transaction=True) as pipe:
            found: list[bytes | None] = await pipe.get(key).set(key, note, nx=True, px=round(keep_s * 1e3)).execute()
        return found[0]

    async def replace_note(self, name: str, before: bytes, after: bytes, keep_s: float = 0.0) -> None:
        words = f"{PREFIX}:note:{name}", before, after, round(keep_s * 1e3)
        async with redis_errors(ANSWER_S):
            await self._requests.eval(REPLACE_NOTE, 1, *words)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._tailer.run())

    async def __aexit__(self, *_: object) -> None:
        """Publishes the rest of ended streams, then removes this process's heartbeat."""
        await self._publishing.close(LAST_EVENTS_S)
        with suppress(RedisError, OSError):
            await self._heart.delete(self._owner_key)
        for client in (self._tail, self._requests, self._publisher, self._heart):
            await client.aclose()

    async def _publish_all(self, owned: _Owned, stream: Stream) -> None:
        """A failure ends only this stream: with an error here, and for readers as if the owner had died."""
        after, has_ended, sizes = 0, False, deque[int]()
        try:
            while not has_ended:
                events = await stream.log.read(after)
                if not await self._publish(owned, stream, sizes, events):
                    stream.end(StreamCancelled("The store lost the stream, so no client can read it."))
                    break
                after, has_ended = events[-1].id, events[-1].is_terminal
        except Exception:
            _log.exception("publishing a stream failed", extra={"request_id": stream.request_id})
            stream.end(Internal("The gateway failed. Its log shows the cause under the request's id."))
        finally:
            now = time.monotonic()
            owned.stream, owned.is_disowned = None, not has_ended
            owned.read_at, owned.due_at = now, now + owned.lifetime_ms / 1e3
            self._quota.mark(owned, evictable=True)

    async def _publish(self, owned: _Owned, stream: Stream, sizes: deque[int], events: list[Event]) -> bool:
        """Returns False if the stream in Redis cannot be written any more. ``sizes``: of each event in Redis.

        Retries while Redis is unavailable, but only briefly if the model waits, because Triton buffers responses.
        Drops the oldest events that do not fit into the limit of the stream or of the process.
        """
        added = [len(event.data) + EVENT_BYTES for event in events]
        sizes.extend(added)
        grown = sum(added)
        while owned.size + grown > MAX_REPLAY_BYTES and len(sizes) > 1 + events[-1].is_terminal:
            grown -= sizes.popleft()
        with suppress(RedisError, OSError):
            while not await self._make_room(owned.caller, size=grown) and len(sizes) > 1:
                grown -= sum(sizes.popleft() for _ in range(len(sizes) // 2))
        self._quota.grow(owned, grown)
        keys, started, last_id = Keys(owned.id), time.monotonic(), events[-1].id
        words = owned.lifetime_ms, last_id + 1 - len(sizes), self._owner, *(word for event in events for word in event)
        while True:
            try:
                return bool(await self._publisher.eval(APPEND, 2, keys.events, keys.stream, *words) == last_id)
            except (RedisError, OSError):
                if time.monotonic() - started > (STALL_S if stream.log.is_full else OUTAGE_S):
                    return False
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _watch(self) -> None:
        """Sends heartbeats, renews the expiry of streams, and ends streams that were deleted or have no reader."""
        is_away = False
        while True:
            try:
                await self._heart.set(self._owner_key, 1, px=OWNER_MS)
                now, streams = time.monotonic(), list(self._streams.values())
                for owned in streams if now - self._beat_at > OUTAGE_NOTICED_S else ():
                    # No client could read meanwhile. It may have been a failover that lost terminal events: readers
                    # may write them again.
                    if owned.stream is not None:
                        owned.read_at = now
                    elif now - owned.read_at < ENDED_S:
                        owned.is_disowned = True
                self._beat_at = now
                for batch in batches(
                    [each for each in streams if each.stream or each.is_disowned or each.due_at <= now]
                ):
                    await self._look_at(batch)
                if is_away:
                    _log.info("Redis at %s answers again", self._address)
                is_away = False
            except (RedisError, OSError) as exc:
                if not is_away:
                    text = "Redis at %s does not answer; until it does, /v1/streams answers 503"
                    _log.warning(text, self._address, extra={"error": type(exc.__cause__ or exc).__name__})
                is_away = True
            await asyncio.sleep(RETRY_PAUSE_S if is_away else HEARTBEAT_S)

    async def _look_at(self, batch: Sequence[_Owned]) -> None:
        """Running streams, and ended ones that are due or disowned."""
        streams = [owned.stream for owned in batch]
        async with self._heart.pipeline(transaction=False) as pipe:
            for owned in batch:
                keys = Keys(owned.id)
                pipe.hget(keys.stream, "owner").exists(keys.readers).pttl(keys.events)
            for owned in batch:
                keys = Keys(owned.id)
                if owned.stream is not None:
                    pipe.pexpire(keys.stream, owned.lifetime_ms).pexpire(keys.events, owned.lifetime_ms)
                elif owned.is_disowned:
                    pipe.eval(DISOWN, 1, keys.stream)
            seen: list[Any] = await pipe.execute()
        now = time.monotonic()
        for owned, stream, owner, has_reader, left_ms in zip(
            batch, streams, seen[0::3], seen[1::3], seen[2::3], strict=False
        ):
            if stream is not None:
                owned.read_at = now if has_reader else owned.read_at
                if owner is None:
                    stream.end(StreamCancelled("The stream was cancelled with DELETE."))
                elif owner != self._owner.encode():
                    stream.end(StreamCancelled("The stream was ended because this process missed its heartbeats."))
                elif now - owned.read_at > owned.resume_s:
                    stream.end(StreamCancelled(f"No client read the stream for {owned.resume_s:g} s."))
                continue
            owned.is_disowned = False
            if left_ms <= 0:
                self._remove(owned)
            elif owned.id in self._streams:
                self._quota.mark(owned, evictable=not has_reader)
                owned.due_at = now + (PRESENCE_MS if has_reader else left_ms) / 1e3

    async def _evict(self, victim: KeptStream) -> None:
        """Raises redis-py's errors."""
        self._quota.mark(victim, evictable=False)
        keys = Keys(victim.id)
        if await self._requests.eval(EVICT, 3, keys.events, keys.stream, keys.readers):
            self._remove(victim)
        else:
            victim.due_at = time.monotonic() + PRESENCE_MS / 1e3

    def _remove(self, kept: KeptStream) -> None:
        if self._streams.pop(kept.id, None) is not None:
            self._quota.remove(kept)
