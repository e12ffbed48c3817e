"""Limits the bytes of all request bodies in memory, and provides the memory of large bodies."""

from mmap import mmap
from time import monotonic

from app.api.body_memory import BodyMemory
from app.api.freed_memory import LARGE_BYTES, FreedMemory, release
from app.domain.errors import TooManyRequests
from app.domain.outflow import Outflow
from app.domain.tensor_memory import TensorMemory


class ByteBudget:
    """``tensor_memory``: for large bodies that consist of one tensor; None: they use ordinary memory."""

    def __init__(self, limit: int, tensor_memory: TensorMemory | None = None) -> None:
        self._limit = limit
        self.tensor_memory = tensor_memory
        self.taken = 0
        self.memory = BodyMemory()
        self._freed = FreedMemory(self._release)
        self._outflow = Outflow()

    def take(self, size: int) -> None:
        """Raises TooManyRequests."""
        if self.taken + size > self._limit:
            raise TooManyRequests(
                "The gateway has reached its limit for bytes of request bodies in memory.",
                hint="Send fewer large bodies at once, or raise GATEWAY_MAX_BYTES_IN_FLIGHT.",
                retry_after_s=self._outflow.retry_after_s(self.taken + size - self._limit, monotonic()),
            )
        self.taken += size

    def give_back(self, size: int, memory: mmap | None = None) -> None:
        """``memory``: of the body. That of a body below LARGE_BYTES is not kept: nothing would release it later."""
        self.taken -= size
        if size:
            self._outflow.left(size, monotonic())
        if memory is not None and size >= LARGE_BYTES:
            self.memory.give_back(memory)
        self._freed.add(size)

    def _release(self) -> None:
        self.memory.drop()
        release()
