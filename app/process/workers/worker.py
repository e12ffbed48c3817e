"""What a worker adds to the start of an ordinary gateway: its share of the limits, the boards, its parent's Triton."""

import asyncio
import ctypes
import fcntl
import logging
import os
import pickle
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from prometheus_client.registry import Collector

from app.config.document import ConfigError
from app.core.share import Share
from app.main import Gateway
from app.observability.log import configure_logging
from app.observability.tracing import TracingUnavailable
from app.process.listening import ListeningPortTaken
from app.process.serving import serve
from app.process.supervision import BackgroundTaskFailed
from app.process.tritons import Triton
from app.process.workers.board import Board, PageOfAll
from app.settings import Settings
from app.streams.store import StoreUnusable

STATES = ("starting", "not_ready", "ready")
BEAT_S = 0.25
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """Created by the parent. Implements :class:`app.api.probes.Processes`.

    ``settings``: with the worker's part of each limit. ``boards``: the parent's, then one for each worker.
    ``announces``: whether this one says when the gateway is ready.
    """

    share: Share
    settings: Settings
    triton: Triton
    restarts_triton: bool
    boards: Sequence[Board]
    parent: int
    announces: bool

    def begin(self) -> None:
        """Call it in the process of the worker."""
        self.own_board.keep_metrics()
        restart = self._ask_for_restart if self.restarts_triton else None
        self.triton = replace(self.triton, restart=restart, share=self.share, turn=self._turn)

    @property
    def own_board(self) -> Board:
        return self.boards[self.share.number]

    @property
    def states(self) -> Mapping[str, str]:
        return {str(n): STATES[int(board.state.get())] for n, board in enumerate(self.boards[1:], 1)}

    @property
    def is_ready(self) -> bool:
        """At start, requires every worker to be ready. Later, workers that are being replaced do not count."""
        states = set(self.states.values())
        return bool(self.boards[0].state.get()) and "ready" in states and "not_ready" not in states

    @property
    def needs_restart(self) -> bool:
        return any(board.needs_restart.get() for board in self.boards)

    def page_of(self, gateway: Gateway) -> Collector:
        """The metrics of all workers."""
        return PageOfAll(gateway.inference.metrics.registry, self.boards)

    async def run(self, gateway: Gateway) -> None:
        """Shows the state of this process until it is cancelled."""
        board = self.own_board
        while True:
            board.beat()
            board.state.set(2 if gateway.inference.catalog.is_ready else 1)
            board.needs_restart.set(gateway.health.needs_restart)
            gateway.show_load()
            await asyncio.sleep(BEAT_S)

    async def _ask_for_restart(self) -> None:
        """The parent started the embedded Triton. It ignores the signal while Triton starts."""
        os.kill(os.getppid(), signal.SIGUSR1)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Yields whether no other worker repairs Triton now. The kernel ends the turn of a process that dies."""
        with Path(f"/proc/self/fd/{self.boards[0].descriptor}").open("rb") as file:  # the lock is that of this opening
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True


def main() -> int:
    """Serves until SIGTERM. Standard input has the pickled Worker. Returns the exit status."""
    worker: Worker = pickle.load(sys.stdin.buffer)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing else would stop the worker without its parent
    if os.getppid() != worker.parent:
        return 0
    worker.begin()
    settings, own = worker.settings, {"worker": worker.share.number}
    configure_logging(settings.log_level, settings.log_format, own, write_bytes=select.PIPE_BUF)
    try:
        uvloop.run(serve(settings, worker))
    except (ConfigError, ListeningPortTaken, StoreUnusable, TracingUnavailable) as exc:
        _log.error("%s", exc)
        return 2
    except BackgroundTaskFailed:
        return 1
    return 0
