"""A separate Triton and gateway, with a link for faults on each side of the gateway."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.client import Ask, Client, Manner, Seen, StreamClient
from tests.live.chaos.ledger import Faults, Ledger, journal_of, lines_of
from tests.live.sessions import write_models
from tests.toolkit.processes import GatewayProcess, linked_models, live_triton, running_gateway
from tests.toolkit.programs import RedisServer, running_program
from tests.toolkit.proxy import Link
from tests.toolkit.waiting import eventually

HERE = Path(__file__).parent
CONFIG = HERE / "gateway.yaml"
OBSERVED = (str(HERE / "observed_gateway.py"),)
QUIET_S = 30.0
RESTARTS = {"first_restart_s": 0.1, "longest_restart_s": 1.0}
"""Of a Triton that tests may kill."""


def mortal_triton() -> Any:
    """A fixture of a module: a Triton that tests may kill, because it is started again."""
    return live_triton(lambda folder: write_models(linked_models(folder), ["int32_oldest"]), restarts=True, **RESTARTS)


@dataclass(frozen=True)
class Levels:
    """The number of objects in an idle gateway; with several workers, in its supervisor."""

    tasks: dict[str, int]
    calls: int
    descriptors: int
    threads: int
    rss_mib: float
    circles: int = 0
    """Objects that only a garbage collection could free, since the last one."""


def levels_of(gateway: GatewayProcess) -> Levels:
    """Of a gateway that `observed_gateway.py` runs."""
    path = gateway.log_path.parent / "levels.json"
    path.unlink(missing_ok=True)
    os.kill(gateway.process.pid, signal.SIGUSR2)
    eventually(path.exists)
    held: dict[str, Any] = json.loads(path.read_text())
    process = psutil.Process(gateway.process.pid)
    return Levels(**held, descriptors=process.num_fds(), threads=process.num_threads(), rss_mib=rss_mib_of(process))


def rss_mib_of(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 2**20)


@dataclass
class Stand:
    """One run of a gateway.

    Attributes:
        redis: stores the resumable streams; None: they are in the memory of the gateway's only process.
        seen: the clients' side of the ledger.
        faults: the faults so far that explain differences in the ledger.
    """

    triton: EmbeddedTriton
    gateway: GatewayProcess
    journal: Path
    log_pipe: psutil.Process
    to_triton: Link
    to_gateway: Link
    config: Path
    redis: RedisServer | None
    seen: list[Seen] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.gateway.process.pid)

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    async def ask(self, ask: Ask, manner: Manner, *, port: int | None = None) -> Seen:
        port = port or self.port
        if ask.is_resumable:
            client: Client = StreamClient(ask, manner, port, lambda: self.gateway.process.poll() is None)
        else:
            client = Client(ask, manner, port)
        seen = await client.run()
        self.seen.append(seen)
        return seen

    async def load(self, work: Iterator[tuple[Ask, Manner]], clients: int) -> None:
        """Sends the requests of ``work`` with this number of concurrent clients."""

        async def client() -> None:
            for ask, manner in work:
                await self.ask(ask, manner)

        await asyncio.gather(*(client() for _ in range(clients)))

    def ledger(self) -> Ledger:
        return Ledger(self.seen, lines_of(self.gateway.json_lines()), journal_of(self.journal), self.faults)

    async def quiet(self) -> None:
        """Waits until the gateway is ready, with all its workers, and has no request in progress."""
        await asyncio.to_thread(eventually, self._is_quiet, QUIET_S)

    def _is_quiet(self) -> bool:
        gauges = ("in_flight_requests", "active_streams", "requests_running", "requests_waiting")
        readiness = httpx.get(f"{self.gateway.admin_url}/health/ready")
        has_workers = set(readiness.json().get("workers", {}).values()) <= {"ready"}
        return not any(map(self.gateway.metric, gauges)) and readiness.status_code == 200 and has_workers


@asynccontextmanager
async def stand_of(
    triton: EmbeddedTriton,
    folder: Path,
    seed: int,
    config: str = CONFIG.read_text(),
    redis: RedisServer | None = None,
    **settings: str,
) -> AsyncIterator[Stand]:
    """``settings``: further ones of the gateway."""
    path = folder / "gateway.yaml"
    await asyncio.to_thread(folder.mkdir, parents=True)
    await asyncio.to_thread(path.write_text, config)
    async with Link(triton.grpc_url, seed).running() as to_triton:
        named = {
            "triton_url": f"127.0.0.1:{to_triton.port}",
            "triton_repair": "true",
            "config": str(path),
            "max_connections": "128",
            "send_timeout_s": "1",
            "drain_s": "1",
            **settings,
        }
        if redis is not None:
            named["redis_url"] = redis.url
        # The gateway's log goes through this process. A test can stop it, which blocks the pipe to it.
        with running_program(["cat"], folder / "log", lambda: True, stdin=subprocess.PIPE) as log_pipe:
            context = running_gateway(folder, program=OBSERVED, log_to=log_pipe.stdin, **named)
            gateway = await asyncio.to_thread(context.__enter__)
            try:
                async with Link(gateway.url.removeprefix("http://"), seed).running() as to_gateway:
                    pipe = psutil.Process(log_pipe.pid)
                    yield Stand(triton, gateway, folder / "journal", pipe, to_triton, to_gateway, path, redis)
            finally:
                await asyncio.to_thread(context.__exit__, None, None, None)
