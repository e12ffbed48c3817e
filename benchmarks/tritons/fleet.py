"""Three embedded Tritons on 127.0.0.2 to .4, and a gateway that uses their DNS name."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from app.launcher.launch import EmbeddedOptions, Ports
from app.launcher.server import EmbeddedTriton
from app.triton.repository import served_repository
from benchmarks.stage import HERE, ROOT, free_ports, process, wait_until_ready

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
    port: int
    admin_port: int

    def has(self, *members: Member) -> None:
        """Sets the addresses of the DNS name."""
        self.names.write_text(" ".join(member.host for member in members))

    async def states(self) -> dict[str, str]:
        async with httpx.AsyncClient() as session:
            answer = await session.get(f"http://127.0.0.1:{self.admin_port}/health/ready")
        return {address.rpartition(":")[0]: state for address, state in answer.json()["tritons"].items()}

    async def answers(self, member: Member) -> float:
        """Returns the number of calls that this Triton has answered."""
        async with httpx.AsyncClient() as session:
            page = (await session.get(f"http://127.0.0.1:{self.admin_port}/metrics")).text
        start = f'triton_gateway_triton_calls_by_address_total{{address="{member.server.grpc_url}",code="OK"}}'
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(start))


@asynccontextmanager
async def fleet(folder: Path, restart_s: float) -> AsyncIterator[Fleet]:
    """``restart_s``: the time until a Triton that was killed is started again."""
    (folder / "models").mkdir()
    (folder / "models" / "bench_sleep").symlink_to(HERE / "models" / "bench_sleep")
    ports = Ports.free(HOSTS[0])
    async with AsyncExitStack() as stack:
        members = [_member(folder, host, ports, restart_s) for host in HOSTS]
        for member in members:
            stack.push_async_callback(member.server.stop)
        await asyncio.gather(*(member.server.start() for member in members))
        for member in members:
            watching = asyncio.create_task(member.server.watch())
            stack.callback(watching.cancel)
        yield await stack.enter_async_context(_with_gateway(folder, tuple(members), ports))


@asynccontextmanager
async def _with_gateway(folder: Path, members: tuple[Member, ...], ports: Ports) -> AsyncIterator[Fleet]:
    port, admin_port = free_ports(2)
    found = Fleet(members, folder / "names", port, admin_port)
    found.has(*members)
    (folder / "gateway.yaml").write_text(CONFIG)
    settings = {
        "GATEWAY_PORT": str(port),
        "GATEWAY_ADMIN_PORT": str(admin_port),
        "GATEWAY_TRITON_URL": f"tritons.test:{ports.grpc}",
        "GATEWAY_CONFIG": str(folder / "gateway.yaml"),
        "GATEWAY_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", "benchmarks.tritons.named", str(found.names), "serve"]
    with process(command, settings, folder / "gateway.log") as running:
        async with httpx.AsyncClient() as client:
            ready = f"http://127.0.0.1:{admin_port}/health/ready"
            await wait_until_ready(client, ready, running, folder / "gateway.log")
        yield found


def _member(folder: Path, host: str, ports: Ports, restart_s: float) -> Member:
    sleep = folder / f"sleep-{host}"
    sleep.write_text(str(SLEEP_MS))
    options = EmbeddedOptions(
        folder / "models",
        ROOT / ".venv-triton",
        ports,
        host=host,
        environment=os.environ | {"BENCH_SLEEP_MS": str(sleep)},
        first_restart_s=restart_s,
        read=served_repository,
    )
    return Member(host, EmbeddedTriton(options), sleep)


async def until(holds: object, within_s: float) -> None:
    """``holds``: an async function without arguments."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not await holds():  # type: ignore[operator]
                await asyncio.sleep(0.02)
            return
    raise TimeoutError("the Tritons did not reach the expected state in time")
