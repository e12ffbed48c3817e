"""This gateway with every tensor over gRPC, beside the same gateway with shared memory: for large bodies only."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.peers.gateway import LARGE_BODIES, binary_asks, started
from benchmarks.peers.peer import Peer
from benchmarks.stage import Triton

NAME = "this gateway, without shared memory"


def start(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    return started(NAME, triton, folder, binary_asks(), more=LARGE_BODIES)
