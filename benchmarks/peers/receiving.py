"""Another lower bound for a binary body: a server without an application, which only receives the body."""

import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.load.orders import HttpAsk
from benchmarks.peers.contents import BINARY
from benchmarks.peers.peer import Peer, serving
from benchmarks.stage import Triton

NAME = "body received, nothing else"


def start(_triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.peers.receiving_app", str(port)]

    asks = {name: HttpAsk("/", file, "application/octet-stream") for name, file in BINARY.items()}
    return serving(NAME, command, "/", asks, folder)
