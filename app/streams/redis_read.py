"""The streams in Redis (6.2 or newer): connections, keys, entries, and reads. Any process may read every stream.

``<id>:events`` is a Redis Stream; the event with id n is the entry ``n-1``, so that two writers cannot both write it.
``<id>:stream`` is a hash: ``owner`` (the process that runs the stream), ``request_id``, ``resume_ms``, ``caller`` (the
id of the API key that started the stream), ``evicted`` (if the events were dropped to make room), ``written`` (if
events were written: Redis itself may have evicted their key, and only it).
``<id>:readers`` exists while the stream has a reader. ``owner:<name>`` exists while that process is alive.
``wake:<name>`` is a Redis Stream that interrupts the blocking read of that process.
``note:<name>`` is a short text that all processes share.

A reader that keeps up gets its events from memory: ``Tailer`` reads all streams that have readers in this process, with
one blocking command on one connection (docs/decisions/0007-resumable-streams.md). A slower reader reads from Redis
itself.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import Any, TypeVar, cast

import orjson
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from app.core.errors import StreamEvicted, UnknownStream, UpstreamUnavailable
from app.streams.store import EVICTED, UNKNOWN, Reader
from app.streams.stream import DROPPED, MAX_READ_BYTES, Event, EventName, ProblemOf, ReplayLog, check_resume

RedisClient = Any
"""redis-py's ``Redis``. Its types match neither chained calls on a pipeline nor the answers of protocol 2."""

PREFIX = "triton-gateway"
"""The keys of all gateways begin with it."""
OUTAGE_S = 30.0
"""How long running streams and open readers wait while Redis does not answer."""
RETRY_PAUSE_S = 0.25
MAX_BATCH = 200
"""Limit of the items in one Redis pipeline, because larger pipelines would block the event loop."""
LEASE_MS = 30_000
"""Keys expire this long after ``resume_s``, so that a missed heartbeat or a restart of Redis loses no stream."""
PRESENCE_MS = 3_000
"""How long a reader's key is valid, in milliseconds."""


@asynccontextmanager
async def redis_errors(within_s: float | None = None) -> AsyncIterator[None]:
    """Converts redis-py's errors to UpstreamUnavailable, without Redis' message, which may contain keys."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except (RedisError, OSError) as exc:
        raise UpstreamUnavailable("The store of streams is not available; send the request again.") from exc


def client_of(url: str, connections: int) -> RedisClient:
    """``connections``: the most. ``timeout``: for a free one. Their commands can be cancelled at any time.

    redis-py sends with ``asyncio.wait_for``, which loses a cancellation in Python 3.11 if it arrives together with the
    result. A task that runs until it is cancelled would then run forever.

    uvloop raises RuntimeError for a connection that Redis has closed, where asyncio writes into nothing. It is
    redis-py's ConnectionError here, after which the command is sent again on a new connection.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=15,
        protocol=2,
        socket_connect_timeout=2,
        socket_timeout=5,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), retries=2),
    )
    connection_class: Any = pool.connection_class

    class Cancellable(connection_class):  # type: ignore[misc]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            task = asyncio.current_task()
            requests = task.cancelling() if task else 0
            try:
                await super().send_packed_command(command, check_health)
            except RuntimeError as exc:
                raise RedisConnectionError(str(exc)) from exc
            if task and task.cancelling() > requests:
                await self.disconnect(nowait=True)  # the caller of its answer has left
                raise asyncio.CancelledError

    pool.connection_class = Cancellable
    return Redis.from_pool(pool)


_T = TypeVar("_T")


def batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yields batches of at most MAX_BATCH items."""
    return (items[start : start + MAX_BATCH] for start in range(0, len(items), MAX_BATCH))


class Keys:
    """The keys of a stream."""

    def __init__(self, stream_id: str) -> None:
        base = f"{PREFIX}:{stream_id}"
        self.events, self.stream, self.readers = f"{base}:events", f"{base}:stream", f"{base}:readers"


def check_known(known: Mapping[bytes, bytes]) -> None:
    """``known``: the hash of a stream. Raises UnknownStream or StreamEvicted."""
    if not known:
        raise UnknownStream(UNKNOWN)
    if b"evicted" in known:
        raise StreamEvicted(EVICTED)


def event_of(entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
    """``entry``: its id and its fields, as redis-py returns it. Raises StreamEvicted if no gateway wrote it."""
    try:
        name = cast("EventName", entry[1][b"name"].decode())
        return Event(int(entry[0].partition(b"-")[0]), name, entry[1][b"data"])
    except (KeyError, ValueError) as exc:
        raise StreamEvicted("An event of this stream in Redis cannot be read.") from exc


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
MAX_EVENTS = 256
"""Limit of one fetch of a slower reader."""
FIRST_EVENTS = 16
"""Limit of its first fetch, before the size of the events is known."""

APPEND = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local last_id, first_id = last and tonumber(string.match(last[1], '^%d+')) or 0, tonumber(ARGV[4])
if last and last[2][2] ~= 'output' then return last_id end
if ARGV[3] == '' and first_id <= last_id or ARGV[3] ~= '' and first_id > last_id + 1 then return last_id end
for i = 4, #ARGV, 3 do
  if tonumber(ARGV[i]) > last_id then
    last_id = tonumber(ARGV[i])
    redis.call('XADD', KEYS[1], last_id .. '-1', 'name', ARGV[i + 1], 'data', ARGV[i + 2])
  end
end
if (not last or ARGV[3] == '') and redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HSET', KEYS[2], 'owner', ARGV[3], 'written', 1)
end
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2] .. '-1')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return last_id
"""
"""Arguments: lifetime, first id to keep, owner, then id, name and data of each event. Returns the newest event's id.

Writes nothing if the stream has ended. Ignores repeated events of its owner, but nothing after events that Redis lost.
Without an owner it writes the terminal event of an orphan, after lost events, but not before events that are unread.
"""

_log = logging.getLogger(__name__)


class Tail(ReplayLog):
    """The newest events of one stream, for all its readers in this process. Older ones are read from Redis."""

    def __init__(self, redis: RedisClient, keys: Keys, known: Mapping[bytes, bytes], newest: Event | None) -> None:
        """``known``: the stream's hash. ``newest``: the last event in Redis; the tail gets only later events.

        Raises StreamEvicted if no gateway wrote the hash.
        """
        super().__init__(MAX_KEPT_BYTES, after=newest)
        try:
            self.owner, self.request_id = known[b"owner"].decode(), known[b"request_id"].decode()
            self.lifetime_ms = int(known[b"resume_ms"]) + LEASE_MS
        except (KeyError, ValueError) as exc:
            raise StreamEvicted("The description of this stream in Redis cannot be read.") from exc
        self._redis = redis
        self._count = FIRST_EVENTS
        self.keys = keys
        self.readers = 0
        self.touched_at, self.orphaned_at = -inf, inf
        self.is_lost = False
        """Whether its readers get UpstreamUnavailable."""

    async def read(self, after: int) -> list[Event]:
        """Also waits during a short outage of Redis. Raises StreamEvicted or UpstreamUnavailable.

        May be cancelled at any await, as each heartbeat does.
        """
        while True:
            with suppress(StreamEvicted):  # then only Redis has the next event
                return await super().read(after)
            try:
                async with redis_errors():
                    found = await self._redis.xrange(self.keys.events, f"{after + 1}-1", count=self._count)
            except UpstreamUnavailable:
                if self.is_lost:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            events = [event_of(entry) for entry in found]
            size = sum(len(event.data) for event in events)
            self._count = max(1, min(MAX_EVENTS, MAX_READ_BYTES * len(events) // max(1, size)))
            events = [event for event_id, event in enumerate(events, after + 1) if event.id == event_id]
            if not events:
                raise StreamEvicted(DROPPED)
            return events

    async def grown(self) -> None:
        """Raises UpstreamUnavailable if the tail is lost."""
        if self.is_lost:
            raise UpstreamUnavailable("The gateway cannot read the stream from its store.")
        await super().grown()


class Tailer:
    """Reads all streams with readers in this process, with one blocking command on one connection.

    ``redis``: for this command. ``requests``: for those of single readers.
    """

    def __init__(self, redis: RedisClient, requests: RedisClient, owner: str, problem_of: ProblemOf) -> None:
        self._redis = redis
        self._requests = requests
        self._problem_of = problem_of
        self._tails: dict[str, Tail] = {}
        """Tails by the key of the stream's events."""
        self._has_tails = asyncio.Event()
        self._wake_key = f"{PREFIX}:wake:{owner}"
        self._woken = "0-0"

    async def reader(self, stream_id: str, after: int) -> Reader | None:
        """Like :meth:`app.streams.store.StreamStore.reader`. The first reader of a stream interrupts the command.

        A failover of Redis may lose the newest events. A reader that had received them then writes the terminal event
        after them, so that they are missing before it.
        """
        keys, next_id = Keys(stream_id), f"{after + 1}-1"
        async with redis_errors():
            async with self._requests.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.stream).xrevrange(keys.events, count=1).xrange(keys.events, next_id, next_id)
                known, newest, following = await pipe.execute()
            check_known(known)
            if b"written" in known and not newest:
                raise StreamEvicted(DROPPED)
            tail = Tail(self._requests, keys, known, event_of(newest[0]) if newest else None)
            first_id = after + 1 if following else tail.last_id + 1
            if not check_resume(after, first_id, tail.last_id, has_ended=tail.has_ended):
                return None
            tail = self._tails.setdefault(keys.events, tail)
            self._has_tails.set()
            tail.readers += 1
            if tail.readers == 1 and not tail.has_ended:
                try:
                    async with self._requests.pipeline(transaction=False) as pipe:
                        pipe.xadd(self._wake_key, {"w": 1}, maxlen=1).pexpire(self._wake_key, PRESENCE_MS)
                        await pipe.execute()
                except BaseException:
                    self.close(tail)
                    raise
        return Reader(tail.read, partial(self.close, tail))

    def close(self, tail: Tail) -> None:
        """Leaves the key for readers to expire, because another process may have a reader too."""
        tail.readers -= 1
        if not tail.readers:
            self._forget(tail)

    async def run(self) -> None:
        """Reads until it is cancelled. Waits during an outage of Redis; raises any other exception."""
        failing_since = inf
        while True:
            if not self._tails:
                failing_since = inf
                self._has_tails.clear()
                await self._has_tails.wait()
            now = time.monotonic()
            try:
                for batch in batches([each for each in self._tails.values() if each.touched_at + TOUCH_S <= now]):
                    await self._touch(batch)
                for tail in list(self._tails.values()):
                    if not tail.has_ended and tail.orphaned_at + ORPHAN_S < now:
                        await self._end(tail)
                await self._read()
                failing_since = inf
            except (RedisError, OSError):
                failing_since = min(failing_since, now)
                for tail in list(self._tails.values()):
                    tail.orphaned_at = inf
                    if failing_since + OUTAGE_S < now:
                        self._lose(tail)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _read(self) -> None:
        """An unreadable entry ends only the connections to its stream."""
        running = {key: f"{tail.last_id}-1" for key, tail in self._tails.items() if not tail.has_ended}
        count = max(1, EVENTS_PER_COMMAND // max(1, len(running)))
        found = await self._redis.xread({**running, self._wake_key: self._woken}, count=count, block=BLOCK_MS)
        for key, entries in found:
            if key.decode() == self._wake_key:
                self._woken = entries[-1][0]
            elif tail := self._tails.get(key.decode()):
                try:
                    tail.extend([event_of(entry) for entry in entries])
                except Exception:
                    _log.exception("a stream in Redis cannot be read", extra={"request_id": tail.request_id})
                    self._lose(tail)
        if found:
            await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_PER_STREAM_S * len(running)))

    async def _touch(self, tails: Sequence[Tail]) -> None:
        """Renews the keys for readers, and checks the owners' heartbeats, and whether Redis still has the events."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for tail in tails:
                keys, lifetime = tail.keys, tail.lifetime_ms
                pipe.hmget(keys.stream, ["owner", "written"]).exists(f"{PREFIX}:owner:{tail.owner}")
                pipe.pexpire(keys.events, lifetime).pexpire(keys.stream, lifetime).set(keys.readers, 1, px=PRESENCE_MS)
            seen: list[Any] = await pipe.execute()
        now = time.monotonic()
        for tail, (owner, is_written), is_alive, has_events in zip(
            tails, seen[::5], seen[1::5], seen[2::5], strict=True
        ):
            tail.touched_at = now
            is_well = is_alive and owner == tail.owner.encode() and (has_events or not is_written)
            tail.orphaned_at = inf if is_well else min(tail.orphaned_at, now)

    async def _end(self, orphan: Tail) -> None:
        """Writes the terminal event of a stream whose process died. If several processes try, one succeeds.

        If the newest event was read already, another reader, which had read less, has written it.
        """
        error = UpstreamUnavailable("The process that ran this stream has ended.")
        event = orphan.last_id + 1, "error", orjson.dumps(self._problem_of(error, orphan.request_id))
        words = orphan.lifetime_ms, 0, "", *event
        newest = await self._redis.eval(APPEND, 2, orphan.keys.events, orphan.keys.stream, *words)
        if newest <= orphan.last_id:
            self._lose(orphan)

    def _lose(self, tail: Tail) -> None:
        self._forget(tail)
        tail.is_lost = True
        tail.wake()

    def _forget(self, tail: Tail) -> None:
        if self._tails.get(tail.keys.events) is tail:
            del self._tails[tail.keys.events]
