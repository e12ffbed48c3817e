"""Three embedded Tritons on 127.0.0.2 to .4, and a gateway that uses their DNS name."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions, Ports
from app.triton.repository import served_repository
from benchmarks.servers import HERE, MODELS_VENV, Peer, running_gateway
from tests.toolkit import processes

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SLEEP_MS = 25
INSTANCES = 4
CONFIG = """pipelines:
  safe: {model: bench_sleep, idempotent: true, sample: {X: 1}}
  once: {model: bench_sleep, sample: {X: 1}}
"""


@dataclass(frozen=True)
class Member:
    host: str
    server: EmbeddedTriton
    sleep: Path
    """The file from which the model reads the milliseconds of a request."""

    def send(self, number: signal.Signals) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, number)

    def sleep_ms(self, milliseconds: float) -> None:
        """Replaces the file in one step, because the model reads it continuously."""
        written = self.sleep.with_suffix(".new")
        written.write_text(str(milliseconds))
        written.replace(self.sleep)

    async def is_ready(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=1) as session:
                return (await session.get(f"{self.server.http_url}/v2/models/bench_sleep/ready")).status_code == 200
        except httpx.TransportError:
            return False


@dataclass(frozen=True)
class Fleet:
    members: tuple[Member, ...]
    names: Path
    gateway: Peer

    def has(self, *members: Member) -> None:
        """Sets the addresses of the DNS name."""
        _write_names(self.names, members)

    async def states(self) -> dict[str, str]:
        async with httpx.AsyncClient() as session:
            answer = await session.get(f"{self.gateway.admin_url}/health/ready")
        return {address.rpartition(":")[0]: state for address, state in answer.json()["tritons"].items()}

    async def answers(self, member: Member) -> float:
        """Returns the number of calls that this Triton has answered."""
        async with httpx.AsyncClient() as session:
            page = (await session.get(f"{self.gateway.admin_url}/metrics")).text
        start = f'triton_gateway_triton_calls_by_address_total{{address="{member.server.grpc_url}",code="OK"}}'
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(start))


@asynccontextmanager
async def fleet(folder: Path, restart_s: float) -> AsyncIterator[Fleet]:
    """``restart_s``: the time until a Triton that was killed is started again."""
    (folder / "models").mkdir()
    (folder / "models" / "bench_sleep").symlink_to(HERE / "models" / "bench_sleep")
    ports, names = Ports.free(HOSTS[0]), folder / "names"
    async with AsyncExitStack() as stack:
        members = tuple(stack.enter_context(_member(folder, host, ports, restart_s)) for host in HOSTS)
        _write_names(names, members)
        program = ("-m", "benchmarks.tritons.named", str(names))
        settings = {"triton_url": f"tritons.test:{ports.grpc}", "log_level": "warning"}
        gateway = running_gateway("fleet", None, folder, {}, config=CONFIG, program=program, **settings)
        yield Fleet(members, names, await stack.enter_async_context(gateway))


def _write_names(path: Path, members: Sequence[Member]) -> None:
    path.write_text(" ".join(member.host for member in members))


@contextmanager
def _member(folder: Path, host: str, ports: Ports, restart_s: float) -> Iterator[Member]:
    sleep = folder / f"sleep-{host}"
    sleep.write_text(str(SLEEP_MS))
    environment = os.environ | {"BENCH_SLEEP_MS": str(sleep)}
    options = EmbeddedOptions(
        folder / "models", MODELS_VENV, ports, host=host, environment=environment, read=served_repository
    )
    with processes.running_triton(replace(options, first_restart_s=restart_s), restarts=True) as server:
        yield Member(host, server, sleep)


async def until(holds: object, within_s: float) -> None:
    """``holds``: an async function without arguments."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not await holds():  # type: ignore[operator]
                await asyncio.sleep(0.02)
            return
    raise TimeoutError("the Tritons did not reach the expected state in time")
