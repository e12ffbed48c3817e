"""Timers that hardly ever fire, for thousands of streams.

One timer of the event loop serves all of them: a timer of uvloop takes 0.7 KiB, and each stream needs two.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from weakref import WeakKeyDictionary


class Timers:
    """The timers of one event loop. A timer is known by its number."""

    def __init__(self) -> None:
        self._numbers = count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        """A heap: the next timer is first."""
        self._cancelled: set[int] = set()
        self._next: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """The number of timers in memory."""
        return len(self._timers)

    def call_at(self, when: float, action: Callable[[], None]) -> int:
        """``when`` in seconds of the event loop's clock."""
        timer = next(self._numbers)
        heapq.heappush(self._timers, (when, timer, action))
        if self._timers[0][1] == timer:
            self._wait()
        return timer

    def cancel(self, timer: int) -> None:
        """Does nothing to a timer that has fired. Frees the memory when half of all timers are cancelled."""
        self._cancelled.add(timer)
        if len(self._cancelled) * 2 > len(self._timers):
            self._timers = [each for each in self._timers if each[1] not in self._cancelled]
            heapq.heapify(self._timers)
            self._cancelled.clear()
            self._wait()

    def _wait(self) -> None:
        if self._next is not None:
            self._next.cancel()
        loop = asyncio.get_running_loop()
        self._next = loop.call_at(self._timers[0][0], self._fire) if self._timers else None

    def _fire(self) -> None:
        now = asyncio.get_running_loop().time()
        try:
            while self._timers and self._timers[0][0] <= now:
                _, timer, action = heapq.heappop(self._timers)
                if timer in self._cancelled:
                    self._cancelled.remove(timer)
                else:
                    action()
        finally:
            self._wait()


_TIMERS: WeakKeyDictionary[asyncio.AbstractEventLoop, Timers] = WeakKeyDictionary()


def timers_of(loop: asyncio.AbstractEventLoop) -> Timers:
    """The timers of the event loop."""
    timers = _TIMERS.get(loop)
    if timers is None:
        timers = _TIMERS[loop] = Timers()
    return timers
