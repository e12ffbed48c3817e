"""``python -m app.process.workers.worker``: a gateway with its share of the limits and its parent's Triton."""

import asyncio
import ctypes
import fcntl
import logging
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from app.config.document import ConfigError
from app.main import Gateway
from app.observability.log import configure_logging
from app.process.listening import ListeningPortTaken
from app.process.supervision import BackgroundTaskFailed
from app.process.tritons import Triton
from app.process.workers.board import Board
from app.settings import Settings

STATES = ("starting", "not_ready", "ready")
BEAT_S = 0.25
_PR_SET_PDEATHSIG = 1


async def restart_by_parent() -> None:
    """The parent started the embedded Triton. It ignores the signal while Triton starts."""
    os.kill(os.getppid(), signal.SIGUSR1)


@contextmanager
def turn_of(board: Board) -> Iterator[bool]:
    """Yields whether no other worker repairs Triton now. The kernel ends the turn of a process that dies."""
    with board.path.open("rb") as file:  # the lock is that of this opening
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


@dataclass(frozen=True, slots=True)
class Worker:
    """Created by the parent. Implements :class:`app.api.probes.Processes`.

    ``settings``: with the worker's part of each limit. ``announces``: whether this one says when the gateway is ready.
    """

    settings: Settings
    triton: Triton
    board: Board
    parent: int
    announces: bool

    @property
    def states(self) -> Mapping[str, str]:
        return {str(n): STATES[status.state] for n, status in enumerate(self.board.statuses) if n}

    @property
    def is_ready(self) -> bool:
        """At start, requires every worker to be ready. Later, workers that are being replaced do not count."""
        states = set(self.states.values())
        return bool(self.board.statuses[0].state) and "ready" in states and "not_ready" not in states

    @property
    def needs_restart(self) -> bool:
        return any(status.needs_restart for status in self.board.statuses)

    async def run(self, gateway: Gateway) -> None:
        """Shows the state of this process until it is cancelled."""
        status = self.board.statuses[self.triton.share.number]
        while True:
            self.board.beat()
            status.state = 2 if gateway.inference.catalog.is_ready else 1
            status.needs_restart = gateway.health.needs_restart
            gateway.show_load()
            await asyncio.sleep(BEAT_S)


def main() -> int:
    """Serves until SIGTERM. Standard input has the pickled Worker. Returns the exit status."""
    from app.process.serving import serve  # noqa: PLC0415 - it imports this module

    worker: Worker = pickle.load(sys.stdin.buffer)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing else would stop the worker without its parent
    if os.getppid() != worker.parent:
        return 0
    settings, number = worker.settings, worker.triton.share.number
    worker.board.keep_metrics(number)
    configure_logging(settings.log_level, settings.log_format, {"worker": number})
    try:
        uvloop.run(serve(settings, worker))
    except (ConfigError, ListeningPortTaken) as exc:
        logging.getLogger(__name__).error("%s", exc)
        return 2
    except BackgroundTaskFailed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
