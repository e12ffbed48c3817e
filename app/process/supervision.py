"""Supervises the background tasks of the process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

_log = logging.getLogger(__name__)


class BackgroundTaskFailed(Exception):
    """A background task ended unexpectedly. The log has its traceback."""


class Supervisor:
    """Owns every background task of the process.

    A background task must never end. If it ends, the supervisor logs the traceback and calls ``on_failure`` once,
    so that the process can shut down. Errors that a task can recover from are handled inside the task.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._has_failed = False

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
                self._on_failure()

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
