"""This gateway under ``/v2``: the same requests as for Triton's own endpoint, at a different address."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.peers import triton_http
from benchmarks.peers.gateway import LARGE_BODIES, SHARED_MEMORY, started
from benchmarks.peers.peer import Asks, Peer
from benchmarks.stage import Triton

NAME = "this gateway, v2"


def start(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    return started(NAME, triton, folder, asks(), more=LARGE_BODIES | SHARED_MEMORY)


def asks() -> Asks:
    return triton_http.asks()
