"""Limits the bytes of all request bodies in memory, and provides the memory of large bodies.

New pages of memory cost as much as the copy into them: 16 MiB take 5.9 ms in new memory, and 1.6 ms in memory that was
used before. So ``ByteBudget`` keeps the mapping of the last body for the next one, and ``FreedMemory`` decides when
freed memory returns to the system.
"""

import asyncio
import ctypes
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from time import monotonic

from app.core.aio import DrainRate
from app.core.errors import TooManyRequests
from app.core.inference import TensorMemory

LARGE_BYTES = 1024 * 1024
IDLE_S = 1.0
KEPT_BYTES = 64 * 1024 * 1024
"""The most freed memory that is kept; glibc keeps as much after a block of 32 MiB, the largest that its heap takes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LIBC = ctypes.CDLL(None)


class FreedMemory:
    """Keeps freed memory while large requests follow each other, and returns it to the system afterwards.

    ``release`` is called in a thread, because it may take milliseconds.
    """

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._timer: asyncio.TimerHandle | None = None

    def add(self, size: int) -> None:
        """Reports freed memory of a request; it is released when no further large request has ended for IDLE_S."""
        if size < LARGE_BYTES:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(IDLE_S, loop.run_in_executor, None, self._release)


def keep() -> None:
    """Keeps memory that is freed from now on.

    glibc keeps freed memory only up to twice the largest block so far, and the blocks of one request are together
    larger. Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, KEPT_BYTES // 2)
    _call_glibc("mallopt", _M_TRIM_THRESHOLD, KEPT_BYTES)


def release() -> None:
    """Returns freed memory to the system."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> None:
    """Does nothing if the C library does not have the function."""
    if (function := getattr(_LIBC, name, None)) is not None:
        function(*arguments)


class ByteBudget:
    """Limits the bytes of all request bodies in memory, and keeps one unused mapping for the next large body.

    ``tensor_memory``: for large bodies that consist of one tensor; None: they use ordinary memory.
    """

    def __init__(self, limit: int, tensor_memory: TensorMemory | None = None) -> None:
        self._limit = limit
        self.tensor_memory = tensor_memory
        self.taken = 0
        self._spare: mmap | None = None
        self._freed = FreedMemory(self._release)
        self._outflow = DrainRate()

    def take(self, size: int) -> None:
        """Raises TooManyRequests."""
        if self.taken + size > self._limit:
            raise TooManyRequests(
                "The gateway has reached its limit for bytes of request bodies in memory.",
                hint="Send fewer large bodies at once, or raise GATEWAY_MAX_BYTES_IN_FLIGHT.",
                retry_after_s=self._outflow.retry_after_s(self.taken + size - self._limit, monotonic()),
            )
        self.taken += size

    def mapping(self, size: int) -> mmap:
        """Returns at least ``size`` bytes with arbitrary content: read only bytes that were written before."""
        spare, self._spare = self._spare, None
        if spare is not None and len(spare) >= size:
            return spare
        return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)

    def give_back(self, size: int, mapping: mmap | None = None) -> None:
        """``mapping``: of the body. It is kept unless something still refers to its memory, as a thread may.

        That of a body below LARGE_BYTES is not kept: nothing would release it later.
        """
        self.taken -= size
        if size:
            self._outflow.left(size, monotonic())
        if size >= LARGE_BYTES:
            if mapping is not None:
                with suppress(BufferError):
                    mapping.resize(len(mapping))  # changes nothing, and is refused while a buffer of it exists
                    self._spare = mapping
            self._freed.add(size)

    def _release(self) -> None:
        self._spare = None
        release()
