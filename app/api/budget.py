"""One budget for the bytes of all request bodies that the gateway holds at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.domain.errors import TooManyRequests


class ByteBudget:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    @contextmanager
    def share(self) -> Iterator["Share"]:
        """What one request takes of the budget. All of it is given back at the end of the block."""
        share = Share(self)
        try:
            yield share
        finally:
            self.taken -= share.taken

    def take(self, size: int) -> None:
        """Raises TooManyRequests."""
        if self.taken + size > self._limit:
            raise TooManyRequests(
                "The gateway holds as many bytes of request bodies as it may.",
                hint="Send fewer large bodies at once, or raise GATEWAY_MAX_BYTES_IN_FLIGHT.",
            )
        self.taken += size


class Share:
    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.taken = 0

    def take(self, size: int) -> None:
        """Raises TooManyRequests."""
        self._budget.take(size)
        self.taken += size
