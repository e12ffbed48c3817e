"""The one seam for what redis-py raises."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

from app.domain.errors import UpstreamUnavailable


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raises UpstreamUnavailable; what Redis said stays its cause, for it may hold keys."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise UpstreamUnavailable("The store of streams is not available; send the request again.") from exc
