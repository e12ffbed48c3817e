"""The benchmark's side of a load process."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.load.orders import Answers, Order, Report
from benchmarks.stage import process


@dataclass(frozen=True)
class LoadProcess:
    pid: int
    connection: "Connection[Order | None, Report | Answers | Exception]"

    async def perform(self, order: Order) -> Any:
        """Raises what the order raised in the process."""
        self.connection.send(order)
        report = await asyncio.to_thread(self.connection.recv)
        if isinstance(report, Exception):
            raise report
        return report


@asynccontextmanager
async def load_process(kind: str, address: str, folder: Path) -> AsyncIterator[LoadProcess]:
    """Starts a load process. ``kind``: http or grpc. ``address``: host:port of the server."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "benchmarks.load", kind, address, str(theirs.fileno())]
    log = folder / f"load-{kind}-{address.rsplit(':', 1)[1]}.log"
    with ours, process(command, {}, log, pass_fds=[theirs.fileno()]) as running:
        theirs.close()
        yield LoadProcess(running.pid, ours)
        ours.send(None)
