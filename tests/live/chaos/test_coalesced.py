"""While requests share calls to Triton and faults happen, nobody gets the answer of another request."""

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.chaos.faults import RECOVERY_S, is_ready
from tests.live.chaos.link import BLACKHOLE, CLEAN, DELAY, RESETS, Link, Spoiling
from tests.live.chaos.report import LONG_S, SEED, write_part
from tests.live.coalesced import config_text, write_models
from tests.live.test_dead_process import processes_of
from tests.toolkit.connections import Connection
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton, wait_until_ready
from tests.toolkit.raw_http import post
from tests.toolkit.waiting import eventually

CLIENTS = 32
LEAVES = 0.1
"""The part of the clients that disconnect after they sent a request."""
PAUSE_S = 0.01
"""After a request that was not answered."""
FIRST_ITEM = 2000
DEADLINE_S = 3.0
REFUSALS = {429, 502, 503, 504}
"""The statuses that a fault may cause."""


@dataclass
class Stand:
    triton: EmbeddedTriton
    link: Link
    gateway: GatewayProcess
    config: Path
    items: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_ITEM))
    ends: Counter[str] = field(default_factory=Counter)
    """``right``, ``left``, or the status of another answer."""
    wrong: list[str] = field(default_factory=list)

    async def ask(self, *, leaves: bool = False) -> str:
        """Sends one request over its own connection. Returns how it ended."""
        item = next(self.items)
        connection = await Connection.to(self.gateway)
        lines = (f"X-Request-Timeout: {DEADLINE_S}", "Connection: close")
        connection.writer.write(post("/v1/pipelines/good", {"item": item}, *lines))
        end = "left" if leaves else self._end_of(item, await connection.reader.read())
        connection.writer.close()
        self.ends[end] += 1
        return end

    def _end_of(self, item: int, answer: bytes) -> str:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head[9:12] or b"0")
        if status != 200:
            return str(status)
        if json.loads(body) != {"negative": -item, "text": f"of {item}"}:
            self.wrong.append(f"{item}: {body.decode()}")
        return "right"

    async def recovered(self) -> None:
        """Waits until twelve requests in a row are answered."""
        await asyncio.to_thread(wait_until_ready, self.gateway, RECOVERY_S)
        ends, working = time.monotonic() + RECOVERY_S, 0
        while working < 12:
            assert time.monotonic() < ends, "requests do not work again"
            working = working + 1 if await self.ask() == "right" else 0

    def is_idle(self) -> bool:
        gauges = ("in_flight_requests", "requests_running", "requests_waiting")
        return not any(map(self.gateway.metric, gauges))


Fault = Callable[[Stand, float], Awaitable[None]]
"""The last argument is the duration of the fault, in seconds."""


def spoiled(spoiling: Spoiling) -> Fault:
    async def fault(stand: Stand, lasts_s: float) -> None:
        stand.link.spoil(spoiling)
        await asyncio.sleep(lasts_s)
        stand.link.reset_all()
        stand.link.spoil(CLEAN)

    return fault


async def triton_stopped(stand: Stand, lasts_s: float) -> None:
    process = psutil.Process(stand.triton.pid)
    process.suspend()
    await asyncio.sleep(lasts_s)
    process.resume()


async def triton_killed(stand: Stand, _lasts_s: float) -> None:
    before = stand.triton.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await asyncio.to_thread(eventually, lambda: stand.triton.pid != before and is_ready(stand.triton), RECOVERY_S)


async def stub_killed(stand: Stand, _lasts_s: float) -> None:
    deaths = stand.gateway.metric("stub_deaths_total")
    for process in processes_of(stand.triton.pid, "good"):
        os.kill(process, signal.SIGKILL)
    await asyncio.to_thread(eventually, lambda: stand.gateway.metric("stub_deaths_total") > deaths, RECOVERY_S)


async def reloads(stand: Stand, lasts_s: float) -> None:
    """Requests share no calls for a while."""
    good = stand.config.read_text()
    for text in (good.replace("coalesce: true", "coalesce: false"), good):
        stand.config.write_text(text)
        await asyncio.sleep(lasts_s)


FAULTS: list[Fault] = [
    spoiled(DELAY),
    spoiled(BLACKHOLE),
    spoiled(RESETS),
    triton_stopped,
    triton_killed,
    stub_killed,
    reloads,
]


@asynccontextmanager
async def stand_of(folder: Path, models_venv: Path) -> AsyncIterator[Stand]:
    write_models(folder / "models")
    config = folder / "gateway.yaml"
    config.write_text(config_text())
    options = EmbeddedOptions(folder / "models", models_venv, first_restart_s=0.1, longest_restart_s=1.0)
    with running_triton(options, restarts=True) as triton:
        async with Link(triton.grpc_url, SEED).running() as link:
            named = {"triton_url": f"127.0.0.1:{link.port}", "triton_repair": "true", "config": str(config)}
            context = running_gateway(folder / "gateway", **named)
            gateway = await asyncio.to_thread(context.__enter__)
            try:
                yield Stand(triton, link, gateway, config)
            finally:
                await asyncio.to_thread(context.__exit__, None, None, None)


@asynccontextmanager
async def loading(stand: Stand) -> AsyncIterator[None]:
    chance, is_over = random.Random(SEED), False

    async def client() -> None:
        while not is_over:
            if await stand.ask(leaves=chance.random() < LEAVES) != "right":
                await asyncio.sleep(PAUSE_S)

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    yield
    is_over = True
    await asyncio.gather(*clients)


@pytest.mark.full
@pytest.mark.timeout(LONG_S + 600)
async def test_faults_give_nobody_the_answer_of_another_request(models_venv: Path, tmp_path: Path) -> None:
    order = random.Random(SEED)
    async with stand_of(tmp_path, models_venv) as stand:
        ends = time.monotonic() + LONG_S
        async with loading(stand):
            while time.monotonic() < ends:
                for fault in order.sample(FAULTS, len(FAULTS)):
                    await fault(stand, order.uniform(0.2, 2.0))
                    await stand.recovered()
        await asyncio.to_thread(eventually, stand.is_idle)
        assert stand.wrong == []
        assert set(stand.ends) <= {"right", "left", *map(str, REFUSALS)}, stand.ends
        shared = stand.gateway.metric("coalesced_requests_total", model="good")
        assert shared > stand.ends["right"] / 4
        await stand.recovered()
        _write(stand, shared)


def _write(stand: Stand, shared: float) -> None:
    ends, count = stand.ends, stand.ends.total()
    failed = count - ends["right"] - ends["left"]
    result = f"answered {ends['right']:,}, left {ends['left']:,}, failed {failed:,}; **0 answers of another request**"
    asked = f"{LONG_S:g} s of faults: {count:,}, of which {shared:,.0f} shared a call"
    rss_mib = psutil.Process(stand.gateway.process.pid).memory_info().rss / 2**20
    write_part("1-coalesced", [("Requests that share calls", asked, result, f"{rss_mib:.1f}")], f"{dict(ends)}\n")
