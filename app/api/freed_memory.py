"""Returns memory to the system after large bodies.

glibc keeps freed memory, up to twice the largest block, for the next request. This is fast for many large bodies, but
wastes up to 64 MiB afterwards. Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
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
        """Reports freed memory of a request; it is released when no further large request has ended for IDLE_S."""
        if size < LARGE_BYTES:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(IDLE_S, loop.run_in_executor, None, self._release)


def release() -> None:
    """Does nothing if the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
