"""Which store of streams the process has: its own memory, or a Redis that several share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.api.problems import problem_of
from app.streams.memory_store import MemoryStore
from app.streams.store import StoreUnusable, StreamStore


@asynccontextmanager
async def running_store(redis_url: str | None) -> AsyncIterator[StreamStore]:
    """Raises StoreUnusable where Redis is asked for and cannot be used."""
    async with _store(redis_url) as store:
        yield store


def _store(redis_url: str | None) -> StreamStore:
    if redis_url is None:
        return MemoryStore()
    try:
        from app.streams.redis_store import RedisStore  # noqa: PLC0415 - of an extra, which may not be installed
    except ModuleNotFoundError as exc:
        raise StoreUnusable("GATEWAY_REDIS_URL needs the extra: pip install 'triton-gateway[redis]'") from exc
    return RedisStore(redis_url, problem_of)
