"""The servers of a benchmark: a real Triton, real gateways, other servers in front of it, and load processes."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from app.triton.repository import served_repository
from benchmarks.load.orders import Answers, Ask, Order, Report
from tests.toolkit import processes
from tests.toolkit.processes import free_ports

HERE = Path(__file__).parent
ROOT = HERE.parent
MODELS_VENV = ROOT / ".venv-triton"
START_S = 60.0
STOP_S = 5.0
MIB = 2**20
SHARED_MEMORY = {"shared_memory_bytes": str(256 * MIB)}
"""The default with the embedded Triton."""
GATEWAY = ("-m", "app.cli")

Triton = EmbeddedTriton
Opens = Callable[[int], AbstractAsyncContextManager[Sequence[Ask]]]
"""Opens this number of sessions for the block, and yields the request of the next step of each."""
Asks = Mapping[str, Ask | Opens]
"""Name of a workload's request -> the request of this server. A server without an entry is not measured."""


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


@dataclass(frozen=True)
class Peer:
    """A running server in front of Triton, or a bare client. ``loads``: the connections are divided among them."""

    name: str
    pids: tuple[int, ...]
    loads: tuple[LoadProcess, ...]
    asks: Asks
    url: str = ""
    admin_url: str = ""

    @property
    def load(self) -> LoadProcess:
        (load,) = self.loads
        return load


Start = Callable[[Triton, Path], AbstractAsyncContextManager[Peer]]
"""Starts a server in front of a running Triton. The folder is for its files."""


@contextmanager
def running_triton(folder: Path, models: Path | None = None) -> Iterator[Triton]:
    """Starts a Triton. ``models``: default the reference models and those of this package, linked into ``folder``."""
    options = EmbeddedOptions(models or _linked_models(folder / "models"), MODELS_VENV, read=served_repository)
    with processes.running_triton(options) as triton:
        yield triton


def _linked_models(folder: Path) -> Path:
    folder.mkdir()
    for source in (ROOT / "triton_models", HERE / "models"):
        for model in source.iterdir():
            if (model / "config.pbtxt").exists():
                (folder / model.name).symlink_to(model)
    return folder


@asynccontextmanager
async def running_gateway(
    name: str,
    triton: Triton | None,
    folder: Path,
    asks: Asks,
    *,
    config: str | None = None,
    program: Sequence[str] = GATEWAY,
    **settings: str,
) -> AsyncIterator[Peer]:
    """Starts a gateway as a separate process until it is ready, which runs its samples.

    ``config``: its gateway.yaml; default the pipelines of the checkout and of this package. ``program``: arguments of
    Python that replace the gateway.
    """
    own = folder / re.sub(r"\W+", "-", name)
    own.mkdir()
    (own / "samples").symlink_to(ROOT / "samples")
    (own / "gateway.yaml").write_text(_pipelines() if config is None else config)
    named = {"config": str(own / "gateway.yaml"), "log_level": "info", "max_connections": "8192", "drain_s": "1"}
    if triton is not None:
        named["triton_url"] = triton.grpc_url
    starting = processes.running_gateway(own, program=program, **{**named, **settings})
    running = await asyncio.to_thread(starting.__enter__)  # a Triton of this event loop answers meanwhile
    try:
        pids = (running.process.pid, *(child.pid for child in psutil.Process(running.process.pid).children()))
        async with load_process("http", urlsplit(running.url).netloc, own) as load:
            yield Peer(name, pids, (load,), asks, running.url, running.admin_url)
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)


def _pipelines() -> str:
    texts = [path.read_text() for path in (ROOT / "gateway.yaml", HERE / "gateway.yaml")]
    return yaml.safe_dump({"pipelines": {k: v for text in texts for k, v in yaml.safe_load(text)["pipelines"].items()}})


@asynccontextmanager
async def running_server(
    name: str, command: Callable[[int], list[str]], ready: str, asks: Asks, folder: Path
) -> AsyncIterator[Peer]:
    """Starts another server. ``command``: its arguments of Python for a port. ``ready``: the path that answers 200."""
    (port,) = free_ports(1)
    log, url = folder / re.sub(r"\W+", "-", f"{name} log"), f"http://127.0.0.1:{port}"
    with process(command(port), log) as running:
        await _until_ready(url + ready, running, log)
        async with load_process("http", f"127.0.0.1:{port}", folder) as load:
            yield Peer(name, (running.pid,), (load,), asks, url)


async def _until_ready(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    """Raises RuntimeError with the end of the log if the server ends, or does not answer 200 within ``START_S``."""
    ends = time.monotonic() + START_S
    async with httpx.AsyncClient() as client:
        while time.monotonic() < ends and running.poll() is None:
            with suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.02)
    raise RuntimeError(f"{log.stem} did not become ready:\n{log.read_text()[-2000:]}")  # noqa: ASYNC240 - the end


@asynccontextmanager
async def direct_client(name: str, kind: str, triton: Triton, folder: Path, asks: Asks) -> AsyncIterator[Peer]:
    """Calls Triton itself. ``kind``: http or grpc. A gRPC client's own process is the one that is measured."""
    address = urlsplit(triton.http_url).netloc if kind == "http" else triton.grpc_url
    async with load_process(kind, address, folder) as load:
        assert triton.pid is not None
        yield Peer(name, (triton.pid if kind == "http" else load.pid,), (load,), asks)


@asynccontextmanager
async def load_process(kind: str, address: str, folder: Path) -> AsyncIterator[LoadProcess]:
    """Starts a load process. ``kind``: http or grpc. ``address``: host:port of the server."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "benchmarks.load", kind, address, str(theirs.fileno())]
    log = folder / f"load-{kind}-{address.rsplit(':', 1)[1]}.log"
    with ours, process(command, log, pass_fds=[theirs.fileno()]) as running:
        theirs.close()
        yield LoadProcess(running.pid, ours)
        ours.send(None)


@contextmanager
def process(command: list[str], log: Path, pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process for the duration of the block, with its output in ``log``. Kills it if it does not end in time."""
    with log.open("wb") as stream:
        running = subprocess.Popen(
            command, stdout=stream, stderr=stream, cwd=ROOT, start_new_session=True, pass_fds=pass_fds
        )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
