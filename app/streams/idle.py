"""An idle timeout that is cheap to renew, for work with frequent events."""

import asyncio
import math
from types import TracebackType
from typing import Self


class IdleTimeout:
    """Raises TimeoutError from its block if :meth:`renew` is not called for ``idle_s`` seconds.

    Works like ``asyncio.timeout``, but :meth:`renew` only notes the time: one timer serves many renewals.
    """

    __slots__ = ("_cancels_before", "_idle_s", "_is_over", "_loop", "_since", "_task", "_timer")

    def __init__(self, idle_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = task.get_loop()
        self._idle_s = idle_s
        self._since = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._cancels_before = 0

    def __enter__(self) -> Self:
        self._cancels_before = self._task.cancelling()
        self.renew()
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        is_last_cancel = self._is_over and self._task.uncancel() <= self._cancels_before
        if is_last_cancel and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error

    def renew(self) -> None:
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_s, self._check)

    def pause(self) -> None:
        """Stops the timeout until the next :meth:`renew`."""
        self._since = math.inf

    def _check(self) -> None:
        self._timer = None
        idle_s = self._loop.time() - self._since
        if idle_s >= self._idle_s:
            self._is_over = True
            self._task.cancel()
        elif self._since != math.inf:
            self._timer = self._loop.call_later(self._idle_s - idle_s, self._check)
