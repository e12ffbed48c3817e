"""Keeps freed memory while large requests follow each other, and returns it to the system afterwards.

New pages cost as much as the copy into them. glibc keeps freed memory only up to twice the largest block so far, and
the blocks of one request are together larger. Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BYTES = 1024 * 1024
IDLE_S = 1.0
KEPT_BYTES = 64 * 1024 * 1024
"""The most freed memory that is kept; glibc keeps as much after a block of 32 MiB, the largest that its heap takes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class FreedMemory:
    """``release`` is called in a thread, because it may take milliseconds."""

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
    """Keeps memory that is freed from now on. Does nothing if the C library has no ``mallopt``."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def release() -> None:
    """Does nothing if the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
