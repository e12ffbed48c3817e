"""This gateway with two workers: two processes that serve the API, and their parent."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.peers import gateway
from benchmarks.peers.peer import Asks, Peer
from benchmarks.stage import Triton

NAME = "this gateway, 2 workers"


def start(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    return gateway.started(NAME, triton, folder, asks(), workers=2)


def asks() -> Asks:
    """Returns the requests with many connections, because one connection uses only one worker."""
    return {"small": gateway.asks()["small"]}
