"""The faults that the tests cause in the gateway and around it while clients send requests."""

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from app.core.errors import Outcome
from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.client import Manner
from tests.live.chaos.link import BLACKHOLE, CLEAN, DELAY, HALF_OPEN, RESETS, Link, Spoiling
from tests.live.chaos.stand import RECOVERY_S, Stand
from tests.live.test_dead_process import processes_of
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.waiting import eventually


class Gateway(Protocol):
    """A gateway, its file, its Triton and the link between both."""

    triton: EmbeddedTriton
    gateway: GatewayProcess
    config: Path
    to_triton: Link


Fault = Callable[[Stand, float], Awaitable[None]]
"""The last argument is the duration of the fault, in seconds."""


def spoiled(spoiling: Spoiling) -> Callable[[Gateway, float], Awaitable[None]]:
    """Of the link between the gateway and Triton."""

    async def fault(stand: Gateway, lasts_s: float) -> None:
        await _spoil(stand.to_triton, spoiling, lasts_s)

    return fault


def spoiled_clients(spoiling: Spoiling) -> Fault:
    async def fault(stand: Stand, lasts_s: float) -> None:
        async with cutting(stand):
            await _spoil(stand.to_gateway, spoiling, lasts_s)

    return fault


async def _spoil(link: Link, spoiling: Spoiling, lasts_s: float) -> None:
    link.spoil(spoiling)
    await asyncio.sleep(lasts_s)
    link.reset_all()
    link.spoil(CLEAN)


@asynccontextmanager
async def cutting(stand: Stand) -> AsyncIterator[None]:
    """Clients may lose their connections within this block."""
    began = time.monotonic()
    yield
    stand.cuts.append((began, time.monotonic()))


async def triton_stopped(stand: Gateway, lasts_s: float) -> None:
    process = psutil.Process(stand.triton.pid)
    process.suspend()
    await asyncio.sleep(lasts_s)
    process.resume()


async def triton_killed(stand: Gateway, _lasts_s: float) -> None:
    """The fixture starts it again."""
    before = stand.triton.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await asyncio.to_thread(eventually, lambda: stand.triton.pid != before and is_ready(stand.triton), RECOVERY_S)


def is_ready(triton: EmbeddedTriton) -> bool:
    try:
        return httpx.get(f"{triton.http_url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def stub_killed(model: str) -> Callable[[Gateway, float], Awaitable[None]]:
    """The gateway reloads the model."""

    async def fault(stand: Gateway, _lasts_s: float) -> None:
        deaths = stand.gateway.metric("stub_deaths_total")
        for process in processes_of(stand.triton.pid, model):
            os.kill(process, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: stand.gateway.metric("stub_deaths_total") > deaths, RECOVERY_S)

    return fault


def reloads(old: str, new: str) -> Callable[[Gateway, float], Awaitable[None]]:
    """A valid change of the file, an invalid file, and the original file."""

    async def fault(stand: Gateway, lasts_s: float) -> None:
        good = stand.config.read_text()
        for text in (good.replace(old, new), "pipelines: [", good):
            stand.config.write_text(text)
            await asyncio.sleep(lasts_s)

    return fault


async def overload(stand: Stand, _lasts_s: float) -> None:
    """More connections at once than the gateway allows."""
    await stand.load(stand.traffic.calm(300), clients=300)


async def more_than_slots(stand: Stand, _lasts_s: float) -> None:
    """More requests than the model's slots and its queue can hold."""
    begun = len(stand.seen)
    await stand.load(stand.traffic.slow(100), clients=80)
    assert any(Outcome.REJECTED in seen.outcomes and seen.is_counted for seen in stand.seen[begun:])


async def stalled_readers(stand: Stand, lasts_s: float) -> None:
    manner = Manner(stalls_s=3 + lasts_s, leaves_after_received=1)
    await asyncio.gather(*(stand.ask(stand.traffic.endless(), manner) for _ in range(8)))


async def no_descriptors(stand: Stand, lasts_s: float) -> None:
    """The gateway cannot accept connections; those in the kernel's queue are served later."""
    pid = stand.gateway.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    async with cutting(stand):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (stand.process.num_fds(), before[1]))
        await asyncio.sleep(lasts_s)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def log_blocked(stand: Stand, lasts_s: float) -> None:
    stand.log_pipe.suspend()
    await asyncio.sleep(lasts_s)
    stand.log_pipe.resume()


FAULTS: dict[str, Fault] = {
    "Triton is stopped": triton_stopped,
    "link to Triton: delay": spoiled(DELAY),
    "link to Triton: blackhole": spoiled(BLACKHOLE),
    "link to Triton: half-open": spoiled(HALF_OPEN),
    "link to Triton: resets": spoiled(RESETS),
    "link to clients: delay": spoiled_clients(DELAY),
    "link to clients: blackhole": spoiled_clients(BLACKHOLE),
    "link to clients: half-open": spoiled_clients(HALF_OPEN),
    "link to clients: resets": spoiled_clients(RESETS),
    "more connections than allowed": overload,
    "more requests than slots": more_than_slots,
    "stalled readers": stalled_readers,
    "no descriptors": no_descriptors,
    "log pipe blocked": log_blocked,
    "gateway.yaml changes": reloads("timeout_s: 4", "timeout_s: 5"),
    "process of a model killed": stub_killed("scripted"),
    "Triton is killed": triton_killed,
}
