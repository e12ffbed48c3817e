"""The connections of resumable streams to Redis (6.2 or newer), and the keys, entries and scripts of a stream there.

``<id>:events`` is a Redis Stream; the event with id n is the entry ``n-1``, so that two writers cannot both write it.
``<id>:stream`` is a hash: ``owner`` (the process that runs the stream), ``request_id``, ``resume_ms``, ``caller`` (the
id of the API key that started the stream), ``evicted`` (if the events were dropped to make room), ``written`` (if
events were written: Redis itself may have evicted their key, and only it).
``<id>:readers`` exists while the stream has a reader. ``owner:<name>`` exists while that process is alive.
``wake:<name>`` is a Redis Stream that interrupts the blocking read of that process.
``note:<name>`` is a short text that all processes share.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from app.core.errors import StreamEvicted, UpstreamUnavailable
from app.streams.events import Event, EventName

RedisClient = Any
"""redis-py's ``Redis``. Its types match neither chained calls on a pipeline nor the answers of protocol 2."""

PREFIX = "triton-gateway"
"""The keys of all gateways begin with it."""
REQUEST_CONNECTIONS = 8
PUBLISH_CONNECTIONS = 16
ANSWER_S = 2.0
"""Time limit for Redis when a stream starts."""
OUTAGE_S = 30.0
"""How long running streams and open readers wait while Redis does not answer."""
RETRY_PAUSE_S = 0.25
MAX_BATCH = 200
"""Limit of the items in one Redis pipeline, because larger pipelines would block the event loop."""
LEASE_MS = 30_000
"""Keys expire this long after ``resume_s``, so that a missed heartbeat or a restart of Redis loses no stream."""
PRESENCE_MS = 3_000
"""How long a reader's key is valid, in milliseconds."""
UNAVAILABLE = "The store of streams is not available; send the request again."


@asynccontextmanager
async def redis_errors(within_s: float | None = None) -> AsyncIterator[None]:
    """Converts redis-py's errors to UpstreamUnavailable, without Redis' message, which may contain keys."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except (RedisError, OSError) as exc:
        raise UpstreamUnavailable(UNAVAILABLE) from exc


class Connections:
    """The connections of one process to Redis, a small fixed number that all streams and readers share.

    Each kind of work has separate connections, so that it cannot block other kinds of work.
    """

    def __init__(self, url: str) -> None:
        self.heartbeat = _client(url, 1)
        self.tail = _client(url, 1)
        self.requests = _client(url, REQUEST_CONNECTIONS)
        """For requests: start, find, replay and delete a stream."""
        self.publish = _client(url, PUBLISH_CONNECTIONS)

    @property
    def address(self) -> str:
        """The address without the password."""
        known = self.heartbeat.get_connection_kwargs()
        return str(known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}")

    async def close(self) -> None:
        for client in (self.tail, self.requests, self.publish, self.heartbeat):
            await client.aclose()


def _client(url: str, connections: int) -> RedisClient:
    """``connections``: the most. ``timeout``: for a free one."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=15,
        protocol=2,
        socket_connect_timeout=2,
        socket_timeout=5,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), retries=2),
    )
    pool.connection_class = _cancellable(cast("Any", pool.connection_class))
    return Redis.from_pool(pool)


@cache
def _cancellable(connection_class: Any) -> Any:
    """Returns a subclass whose commands can be cancelled at any time.

    redis-py sends with ``asyncio.wait_for``, which loses a cancellation in Python 3.11 if it arrives together with the
    result. A task that runs until it is cancelled would then run forever.

    uvloop raises RuntimeError for a connection that Redis has closed, where asyncio writes into nothing. It is a
    redis-py's ConnectionError here, after which the command is sent again on a new connection.
    """

    class Cancellable(connection_class):  # type: ignore[misc]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            task = asyncio.current_task()
            requests = task.cancelling() if task else 0
            try:
                await super().send_packed_command(command, check_health)
            except RuntimeError as exc:
                raise RedisConnectionError(str(exc)) from exc
            if task and task.cancelling() > requests:
                await self.disconnect(nowait=True)  # its answer belongs to nobody
                raise asyncio.CancelledError

    return Cancellable


_T = TypeVar("_T")


def batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yields batches of at most MAX_BATCH items."""
    return (items[start : start + MAX_BATCH] for start in range(0, len(items), MAX_BATCH))


PUBLISH = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local last_id = last and tonumber(string.match(last[1], '^%d+')) or 0
if last and last[2][2] ~= 'output' or tonumber(ARGV[3]) > last_id + 1 then return 0 end
for i = 3, #ARGV, 3 do
  if tonumber(ARGV[i]) > last_id then
    redis.call('XADD', KEYS[1], ARGV[i] .. '-1', 'name', ARGV[i + 1], 'data', ARGV[i + 2])
  end
end
if not last and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'written', 1) end
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2] .. '-1')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
"""Arguments: lifetime, first id to keep, then id, name and data of each event. Repeated events are ignored.

Returns 0 and writes nothing if another process ended the stream or Redis lost it.
"""

DISOWN = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'owner', '') end"
"""Marks that the owner writes no further events, so that a reader may write the terminal event."""

END_ORPHAN = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local last_id = last and tonumber(string.match(last[1], '^%d+')) or 0
if last and (last[2][2] ~= 'output' or last_id > tonumber(ARGV[2])) then return last_id end
redis.call('XADD', KEYS[1], (tonumber(ARGV[2]) + 1) .. '-1', 'name', 'error', 'data', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'owner', '', 'written', 1) end
return tonumber(ARGV[2]) + 1
"""
"""Arguments: lifetime, last read id, data of the terminal event. A no-op if there are unread events.

Returns the id of the newest event. If it is not above the last read id, another reader, which had read less, has
written the terminal event.
"""

EVICT = """
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
redis.call('DEL', KEYS[1])
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'evicted', 1) end
return 1
"""
"""Drops the events of an ended stream. Returns 0 if the stream has a reader, and does nothing then."""

CLAIM_NOTE = """
local known = redis.call('GET', KEYS[1])
if not known then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return known
"""
REPLACE_NOTE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
"""


class RedisNotes:
    """Implements :class:`app.streams.store.Notes`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def claim(self, name: str, note: bytes, keep_s: float) -> bytes | None:
        async with redis_errors(ANSWER_S):
            key = f"{PREFIX}:note:{name}"
            known: bytes | None = await self._redis.eval(CLAIM_NOTE, 1, key, note, round(keep_s * 1e3))
        return known

    async def replace(self, name: str, before: bytes, after: bytes, keep_s: float = 0.0) -> None:
        async with redis_errors(ANSWER_S):
            await self._redis.eval(REPLACE_NOTE, 1, f"{PREFIX}:note:{name}", before, after, round(keep_s * 1e3))


class Keys(NamedTuple):
    """The keys of a stream."""

    events: str
    stream: str
    readers: str


def keys_of(stream_id: str) -> Keys:
    base = f"{PREFIX}:{stream_id}"
    return Keys(f"{base}:events", f"{base}:stream", f"{base}:readers")


def owner_key(owner: str) -> str:
    return f"{PREFIX}:owner:{owner}"


def entry_id(event_id: int) -> str:
    return f"{event_id}-1"


def event_of(entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
    """``entry``: its id and its fields, as redis-py returns it. Raises StreamEvicted if no gateway wrote it."""
    try:
        name = cast("EventName", entry[1][b"name"].decode())
        return Event(int(entry[0].partition(b"-")[0]), name, entry[1][b"data"])
    except (KeyError, ValueError) as exc:
        raise StreamEvicted("An event of this stream in Redis cannot be read.") from exc


def lifetime_ms(resume_s: float) -> int:
    return round(resume_s * 1e3) + LEASE_MS
