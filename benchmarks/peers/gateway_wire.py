"""This gateway with every tensor over gRPC, to compare with shared memory. Only for large bodies."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.peers.gateway import LARGE_BODIES, binary_asks, started
from benchmarks.peers.peer import Peer
from benchmarks.stage import Triton

NAME = "this gateway, without shared memory"


def start(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    return started(NAME, triton, folder, binary_asks(), more=LARGE_BODIES)
