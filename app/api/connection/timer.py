"""A timer that is started for each request and hardly ever fires."""

import asyncio
from collections.abc import Callable


class LazyTimer:
    """Has one call of the event loop pending, and moves it only when that call comes too early: a start is cheap."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._action: Callable[[], None] | None = None

    def start(self, delay_s: float, action: Callable[[], None]) -> None:
        """Replaces the action and the time of the start before."""
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
        """No call is pending after this one."""
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
