"""A peer: a server in front of Triton, or a bare client, and its requests."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.load.orders import Ask
from benchmarks.load.process import LoadProcess, load_process
from benchmarks.stage import CALL_S, Triton, free_ports, process, wait_until_ready

Asks = Mapping[str, Ask]
"""Name of a content (``contents.py``) -> the request of this peer. A peer without an entry is not measured."""


@dataclass(frozen=True)
class Peer:
    """A running peer. ``pid`` and ``workers``: its processes. ``load``: sends the requests."""

    name: str
    pid: int
    load: LoadProcess
    asks: Asks
    workers: tuple[int, ...] = ()


Start = Callable[[Triton, Path], AbstractAsyncContextManager[Peer]]
"""Starts a peer in front of a running Triton. The folder is for its logs."""


@asynccontextmanager
async def serving(
    name: str, command: Callable[[int], list[str]], ready: str, asks: Asks, folder: Path
) -> AsyncIterator[Peer]:
    """Starts a peer as a server. ``command``: its command line for a port. ``ready``: the path that answers 200."""
    (port,) = free_ports(1)
    log = folder / f"{name.replace(' ', '-')}.log"
    with process(command(port), {}, log) as running:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=CALL_S) as client:
            await wait_until_ready(client, ready, running, log)
        async with load_process("http", f"127.0.0.1:{port}", folder) as load:
            yield Peer(name, running.pid, load, asks)
