"""Signal handling, and the two phases after the first signal: the delay and the drain."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.api.exchange import Workload
from app.core.errors import Draining
from app.process.listening import Server

LAST_BYTES_S = 5.0
"""Time limit for ended requests and streams to send their last bytes."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class ShutdownRequested(Exception):
    """A signal arrived before the work was done."""


class Shutdown:
    """``requested`` is set by the first SIGTERM, SIGINT or SIGHUP, ``hurried`` by the second."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()

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


async def delay(workload: Workload, server: Server, shutdown: Shutdown, delay_s: float) -> None:
    """Still serves every request for ``delay_s`` seconds, or until the second signal, and closes each connection.

    Readiness fails at once, so load balancers send new connections elsewhere. Each answer has ``Connection: close``,
    so clients with open connections follow, without a request that fails.
    """
    workload.is_shutting_down = True
    server.close_after_answers()
    if delay_s:
        _log.info("shutting down", extra={"in_flight": len(workload.running), "delay_s": delay_s})
        await first_of(shutdown.hurried.wait(), timeout_s=delay_s)


async def drain(workload: Workload, shutdown: Shutdown, drain_s: float) -> None:
    """Rejects new work, lets running work finish, then ends the remaining work with ``draining``.

    Running work may take ``drain_s`` seconds, or until the second signal.
    """
    _log.info("draining", extra={"in_flight": len(workload.running), "drain_s": drain_s})
    workload.start_draining()
    await first_of(workload.idle(), shutdown.hurried.wait(), timeout_s=drain_s)
    workload.end_all(Draining("The gateway is shutting down."))
    await first_of(workload.idle(), timeout_s=LAST_BYTES_S)


async def first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Returns when the first of ``waits`` is done, or after the time, and cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
