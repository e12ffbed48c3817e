"""The connections of resumable streams to Redis (6.2 or newer), and the keys and entries of a stream there.

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
from typing import Any, TypeVar, cast

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


def client_of(url: str, connections: int) -> RedisClient:
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


class Keys:
    """The keys of a stream."""

    def __init__(self, stream_id: str) -> None:
        base = f"{PREFIX}:{stream_id}"
        self.events, self.stream, self.readers = f"{base}:events", f"{base}:stream", f"{base}:readers"


def owner_key(owner: str) -> str:
    return f"{PREFIX}:owner:{owner}"


def event_of(entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
    """``entry``: its id and its fields, as redis-py returns it. Raises StreamEvicted if no gateway wrote it."""
    try:
        name = cast("EventName", entry[1][b"name"].decode())
        return Event(int(entry[0].partition(b"-")[0]), name, entry[1][b"data"])
    except (KeyError, ValueError) as exc:
        raise StreamEvicted("An event of this stream in Redis cannot be read.") from exc
