"""Connects this process to Redis (6.2 or newer), which several processes share. Needs the extra `redis`."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from app.core.errors import UpstreamUnavailable

RedisClient = Any
"""redis-py's ``Redis``. Its types match neither chained calls on a pipeline nor the answers of protocol 2."""

PREFIX = "triton-gateway"
"""The keys of all gateways begin with it."""
MAX_BATCH = 200
"""Limit of the items in one Redis pipeline, because larger pipelines would block the event loop."""
FREE_CONNECTION_S = 15.0
"""Time limit for a free connection."""


@contextmanager
def redis_errors_as(detail: str) -> Iterator[None]:
    """Converts redis-py's errors to UpstreamUnavailable, without Redis' message, which may contain keys."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise UpstreamUnavailable(detail) from exc


def redis_client(url: str, connections: int) -> RedisClient:
    """Returns a client with at most this number of connections."""
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


_T = TypeVar("_T")


def batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yields batches of at most MAX_BATCH items."""
    return (items[start : start + MAX_BATCH] for start in range(0, len(items), MAX_BATCH))
