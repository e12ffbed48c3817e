"""The connections of one process to Redis, a small fixed number that all streams and readers share."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from app.domain.errors import UpstreamUnavailable

RedisClient = Any
"""redis-py's ``Redis``. Its types match neither chained calls on a pipeline nor the answers of protocol 2."""

REQUEST_CONNECTIONS = 8
PUBLISH_CONNECTIONS = 16
FREE_CONNECTION_S = 15.0
"""Time limit for a free connection."""
OUTAGE_S = 30.0
"""How long running streams and open readers wait while Redis does not answer."""
RETRY_PAUSE_S = 0.25
UNAVAILABLE = "The store of streams is not available; send the request again."


class Connections:
    """Each kind of work has separate connections, so that it cannot block other kinds of work."""

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


@contextmanager
def redis_errors() -> Iterator[None]:
    """Converts redis-py's errors to UpstreamUnavailable, without Redis' message, which may contain keys."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise UpstreamUnavailable(UNAVAILABLE) from exc


def _client(url: str, connections: int) -> RedisClient:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=FREE_CONNECTION_S,
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
    """

    class Cancellable(connection_class):  # type: ignore[misc]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            task = asyncio.current_task()
            requests = task.cancelling() if task else 0
            await super().send_packed_command(command, check_health)
            if task and task.cancelling() > requests:
                await self.disconnect(nowait=True)  # its answer belongs to nobody
                raise asyncio.CancelledError

    return Cancellable
