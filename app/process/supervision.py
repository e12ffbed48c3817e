"""The life of the process: its background tasks, and the signals that end it."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class BackgroundTaskFailed(Exception):
    """A background task ended unexpectedly. The log has its traceback."""


class ShutdownRequested(Exception):
    """A signal arrived before the work was done."""


class Supervisor:
    """Owns every background task of the process. ``requested`` is set by the first signal, ``hurried`` by the second.

    A background task must never end. If it ends, the supervisor logs the traceback and requests the shutdown. Errors
    that a task can recover from are handled inside the task.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()
        self._has_failed = False

    def request(self) -> None:
        (self.hurried if self.requested.is_set() else self.requested).set()

    def listen_to_signals(self) -> None:
        """Signals that are ignored at the start of the process stay ignored (SIGHUP with nohup)."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.request)

    async def unless_requested(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Returns the result of ``work``. If a signal arrives first, cancels ``work`` and raises ShutdownRequested."""
        working = asyncio.create_task(work)
        await first_of(working, self.requested.wait())
        if self.requested.is_set():
            raise ShutdownRequested
        return working.result()

    @asynccontextmanager
    async def running(
        self, name: str, work: Coroutine[Any, Any, None], *, stop: Callable[[], None] | None = None
    ) -> AsyncIterator[None]:
        """Runs ``work`` for the duration of the block.

        At the end of the block ``stop`` asks the task to end; without ``stop`` the task is cancelled. Either way the
        block waits for the task.
        """
        task = asyncio.create_task(work, name=name)
        is_stopping = False

        def check(ended: asyncio.Task[None]) -> None:
            error = None if ended.cancelled() else ended.exception()
            if is_stopping and error is None:
                return
            _log.critical("the background task '%s' ended unexpectedly; shutting down", name, exc_info=error)
            if not self._has_failed:
                self._has_failed = True
                self.request()

        task.add_done_callback(check)
        try:
            yield
        finally:
            is_stopping = True
            (stop or task.cancel)()
            await asyncio.wait({task})

    def raise_if_failed(self) -> None:
        """Raises BackgroundTaskFailed."""
        if self._has_failed:
            raise BackgroundTaskFailed


async def first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Returns when the first of ``waits`` is done, or after the time, and cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
