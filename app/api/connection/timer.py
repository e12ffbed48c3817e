"""A timer that is cheap to start for each request, because it rarely fires."""

import asyncio
from collections.abc import Callable


class LazyTimer:
    """Keeps one pending call in the event loop and reschedules it only when it fires too early, so a start is cheap."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._action: Callable[[], None] | None = None

    def start(self, delay_s: float, action: Callable[[], None]) -> None:
        """Replaces the action and the time of an earlier start."""
        self._action = action
        self._due = self._loop.time() + delay_s
        if self._pending is not None and self._pending.when() > self._due:
            self._pending.cancel()
            self._pending = None
        if self._pending is None:
            self._wait()

    def stop(self) -> None:
        self._action = None

    def close(self) -> None:
        """Cancels the pending call."""
        self._action = None
        if self._pending is not None:
            self._pending.cancel()

    def _wait(self) -> None:
        self._pending = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._pending = None
        if self._action is None:
            return
        if self._loop.time() < self._due:
            self._wait()
            return
        action, self._action = self._action, None
        action()
