"""One budget for the bytes of all request bodies that the gateway holds at a time."""

from app.api.freed_memory import FreedMemory
from app.domain.errors import TooManyRequests


class ByteBudget:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0
        self._freed = FreedMemory()

    def take(self, size: int) -> None:
        """Raises TooManyRequests."""
        if self.taken + size > self._limit:
            raise TooManyRequests(
                "The gateway holds as many bytes of request bodies as it may.",
                hint="Send fewer large bodies at once, or raise GATEWAY_MAX_BYTES_IN_FLIGHT.",
            )
        self.taken += size

    def give_back(self, size: int) -> None:
        self.taken -= size
        self._freed.add(size)
