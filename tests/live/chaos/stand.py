"""A Triton and a gateway of their own, with a spoilable link on each side of the gateway."""

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.triton.embedded.server import EmbeddedTriton
from tests.live.chaos.client import Ask, Client, Manner, Seen
from tests.live.chaos.ledger import Interval, Ledger, journal_of, lines_of
from tests.live.chaos.link import Link
from tests.live.test_cancellation import eventually
from tests.processes import GatewayProcess, running_gateway

HERE = Path(__file__).parent
MAX_CONNECTIONS = 128
QUIET_S = 30.0


@dataclass(frozen=True)
class Levels:
    """The number of objects in an idle gateway."""

    tasks: dict[str, int]
    calls: int
    descriptors: int
    threads: int
    rss_mib: float

    def holds_no_more_than(self, other: "Levels") -> bool:
        """One call is allowed: the gateway asks now and then whether Triton is live."""
        is_same = Counter(self.tasks) <= Counter(other.tasks) and self.descriptors <= other.descriptors
        return is_same and self.calls <= max(other.calls, 1)


@dataclass
class Stand:
    """One life of a gateway. ``seen``: the clients' side of the ledger; ``cuts``: when connections were cut."""

    triton: EmbeddedTriton
    gateway: GatewayProcess
    journal: Path
    log_pipe: psutil.Process
    to_triton: Link
    to_gateway: Link
    config: Path
    seen: list[Seen] = field(default_factory=list)
    cuts: list[Interval] = field(default_factory=list)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.gateway.process.pid)

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    async def ask(self, ask: Ask, manner: Manner, *, port: int | None = None) -> Seen:
        seen = await Client(ask, manner).run(port or self.port)
        self.seen.append(seen)
        return seen

    async def load(self, work: Iterator[tuple[Ask, Manner]], clients: int, *, port: int | None = None) -> None:
        """Sends the requests of ``work`` with this number of concurrent clients."""

        async def client() -> None:
            for ask, manner in work:
                await self.ask(ask, manner, port=port)

        await asyncio.gather(*(client() for _ in range(clients)))

    def ledger(self) -> Ledger:
        return Ledger(self.seen, lines_of(self.gateway.json_lines()), journal_of(self.journal))

    async def quiet(self) -> None:
        """Waits until the gateway is ready, and neither it nor a model works on anything."""
        await asyncio.to_thread(eventually, self._is_quiet, QUIET_S)

    def _is_quiet(self) -> bool:
        gateway = self.gateway
        gauges = ("in_flight_requests", "active_streams", "requests_running", "requests_waiting")
        return not any(map(gateway.metric, gauges)) and httpx.get(f"{gateway.url}/health/ready").status_code == 200

    def levels(self) -> Levels:
        path = self.gateway.log_path.parent / "levels.json"
        path.unlink(missing_ok=True)
        os.kill(self.gateway.process.pid, signal.SIGUSR2)
        eventually(path.exists, 10.0)
        held: dict[str, Any] = json.loads(path.read_text())
        process = self.process
        rss_mib = process.memory_info().rss / 2**20
        return Levels(held["tasks"], held["calls"], process.num_fds(), process.num_threads(), rss_mib)


@asynccontextmanager
async def stand_of(triton: EmbeddedTriton, folder: Path, seed: int, **settings: str) -> AsyncIterator[Stand]:
    """``settings``: of the gateway, beside those of the stand."""
    config = await asyncio.to_thread(_config_in, folder)
    async with Link(triton.grpc_url, seed).running() as to_triton:
        named = {
            "triton_url": f"127.0.0.1:{to_triton.port}",
            "triton_repair": "true",
            "config": str(config),
            "max_connections": str(MAX_CONNECTIONS),
            "send_timeout_s": "1",
            "drain_s": "1",
        } | settings
        with log_pipe_to(folder / "log") as log_pipe:
            context = running_gateway(
                folder, program=(str(HERE / "observed_gateway.py"),), log_to=log_pipe.stdin, **named
            )
            gateway = await asyncio.to_thread(context.__enter__)
            try:
                async with Link(gateway.url.removeprefix("http://"), seed).running() as to_gateway:
                    pipe = psutil.Process(log_pipe.pid)
                    yield Stand(triton, gateway, folder / "journal", pipe, to_triton, to_gateway, config)
            finally:
                await asyncio.to_thread(context.__exit__, None, None, None)


def _config_in(folder: Path) -> Path:
    folder.mkdir()
    config = folder / "gateway.yaml"
    config.write_text((HERE / "gateway.yaml").read_text())
    return config


@contextmanager
def log_pipe_to(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that copies a gateway's log to a file, and can be stopped, which blocks the pipe to it."""
    with path.open("wb") as log:
        pipe = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
    try:
        yield pipe
    finally:
        with suppress(ProcessLookupError):
            pipe.send_signal(signal.SIGCONT)
        pipe.terminate()
        pipe.wait(10)
