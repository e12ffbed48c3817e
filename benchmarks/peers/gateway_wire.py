"""This gateway with every tensor over gRPC, beside the same gateway with shared memory: for large bodies only."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.load.process import load_process
from benchmarks.peers.gateway import LARGE_BODIES, binary_asks
from benchmarks.peers.peer import Peer
from benchmarks.stage import Triton, running_gateway

NAME = "this gateway, without shared memory"


@asynccontextmanager
async def start(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    own = folder / "without-shared-memory"
    own.mkdir()
    async with (
        running_gateway(own, triton, log_level="info", more=LARGE_BODIES) as gateway,
        load_process("http", urlsplit(gateway.url).netloc, own) as load,
    ):
        yield Peer(NAME, gateway.pid, load, binary_asks())
