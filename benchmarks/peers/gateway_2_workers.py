"""This gateway with two workers: a supervisor, and two processes that serve the API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.load.process import load_process
from benchmarks.peers import gateway
from benchmarks.peers.peer import Asks, Peer
from benchmarks.stage import Triton, running_gateway

NAME = "this gateway, 2 workers"


@asynccontextmanager
async def start(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    own = folder / "two-workers"
    own.mkdir()
    async with (
        running_gateway(own, triton, log_level="info", workers=2) as running,
        load_process("http", urlsplit(running.url).netloc, own) as load,
    ):
        workers = tuple(child.pid for child in psutil.Process(running.pid).children())
        yield Peer(NAME, running.pid, load, asks(), workers)


def asks() -> Asks:
    """What many connections ask: one connection has one worker."""
    return {"small": gateway.asks()["small"]}
