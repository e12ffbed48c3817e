"""Gives memory back to the system after large bodies.

glibc keeps what is freed, up to twice the largest block, for the next request. That is fast while large bodies come one
after the other, and a waste of up to 64 MiB afterwards. Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BYTES = 1024 * 1024
IDLE_S = 1.0


class FreedMemory:
    """``release`` is called in a thread, because it may take milliseconds."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._timer: asyncio.TimerHandle | None = None

    def add(self, size: int) -> None:
        """Memory of a request is free: releases it when no further large request has ended for IDLE_S."""
        if size < LARGE_BYTES:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(IDLE_S, loop.run_in_executor, None, self._release)


def release() -> None:
    """Does nothing where the C library is another than glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
