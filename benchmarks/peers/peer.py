"""A peer: a server before Triton, or the floor, and how it is asked."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.load.orders import Ask
from benchmarks.load.process import LoadProcess, load_process
from benchmarks.stage import CALL_S, Triton, free_ports, process, wait_until_ready

Asks = Mapping[str, Ask]
"""What is asked (``contents.py``) -> how this peer is asked for it. A peer takes part where it has an entry."""


@dataclass(frozen=True)
class Peer:
    """``pid`` and ``workers``: the processes whose CPU time and memory are the peer's. ``load`` asks it."""

    name: str
    pid: int
    load: LoadProcess
    asks: Asks
    workers: tuple[int, ...] = ()


Start = Callable[[Triton, Path], AbstractAsyncContextManager[Peer]]
"""Starts a peer before a running Triton. The folder is for its logs."""


@asynccontextmanager
async def serving(
    name: str, command: Callable[[int], list[str]], ready: str, asks: Asks, folder: Path
) -> AsyncIterator[Peer]:
    """A peer that is a server of its own. ``command``: for a port. ``ready``: the path that answers 200."""
    (port,) = free_ports(1)
    log = folder / f"{name.replace(' ', '-')}.log"
    with process(command(port), {}, log) as running:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=CALL_S) as client:
            await wait_until_ready(client, ready, running, log)
        async with load_process("http", f"127.0.0.1:{port}", folder) as load:
            yield Peer(name, running.pid, load, asks)
