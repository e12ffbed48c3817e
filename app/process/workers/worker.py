"""What a worker adds to the start of an ordinary gateway: its share of the limits, the boards, its parent's Triton."""

import asyncio
import fcntl
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.main import Gateway
from app.process.tritons import Triton
from app.process.workers.board import Board, PageOfAll
from app.settings import Settings

STATES = ("starting", "not_ready", "ready")
BEAT_S = 0.25


async def restart_by_parent() -> None:
    """The parent started the embedded Triton. It ignores the signal while Triton starts."""
    os.kill(os.getppid(), signal.SIGUSR1)


@contextmanager
def turn_of(board: Board) -> Iterator[bool]:
    """Yields whether no other worker repairs Triton now. The kernel ends the turn of a process that dies."""
    with Path(f"/proc/self/fd/{board.descriptor}").open("rb") as file:  # the lock is that of this opening
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


@dataclass(frozen=True, slots=True)
class Worker:
    """Created by the parent. Implements :class:`app.api.probes.Processes`.

    ``settings``: with the worker's part of each limit. ``boards``: the parent's, then one for each worker.
    ``announces``: whether this one says when the gateway is ready.
    """

    settings: Settings
    triton: Triton
    boards: Sequence[Board]
    parent: int
    announces: bool

    @property
    def board(self) -> Board:
        """That of this worker."""
        return self.boards[self.triton.share.number]

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

    def join(self, gateway: Gateway) -> None:
        """The gateway's page has the metrics of all workers."""
        gateway.page = PageOfAll(gateway.inference.metrics.registry, self.boards)

    async def run(self, gateway: Gateway) -> None:
        """Shows the state of this process until it is cancelled."""
        while True:
            self.board.beat()
            self.board.state.set(2 if gateway.inference.catalog.is_ready else 1)
            self.board.needs_restart.set(gateway.health.needs_restart)
            gateway.show_load()
            await asyncio.sleep(BEAT_S)
