"""The faults that the tests cause in the gateway and around it while clients send requests."""

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Literal

import psutil

from app.core.errors import Outcome
from app.streams.redis_store import HEARTBEAT_S
from tests.live.chaos.client import Manner
from tests.live.chaos.ledger import Kill
from tests.live.chaos.stand import Stand
from tests.live.chaos.traffic import Traffic
from tests.live.sessions import answers_ready, kill_triton
from tests.live.test_dead_process import processes_of
from tests.live.test_workers import has_all_workers
from tests.toolkit.connections import deaths_of, workers_of
from tests.toolkit.processes import wait_until_ready
from tests.toolkit.proxy import BLACKHOLE, CLEAN, DELAY, HALF_OPEN, RESETS, Spoiling
from tests.toolkit.waiting import eventually

Fault = Callable[[Stand, Traffic, float], Awaitable[None]]
"""The last argument is the duration of the fault, in seconds."""
RECOVERY_S = 60.0
SPOILINGS = {"delay": DELAY, "blackhole": BLACKHOLE, "half-open": HALF_OPEN, "resets": RESETS}
MOST_AWAY_S = 20.0
"""Less than the 30 s that readers of streams wait for Redis. The replacement of a worker that was killed often takes
up to 30 s."""


@asynccontextmanager
async def cutting(stand: Stand) -> AsyncIterator[None]:
    """Clients may lose their connections within this block."""
    began = time.monotonic()
    yield
    stand.faults.cuts.append((began, time.monotonic()))


def spoiled(link: Literal["to_triton", "to_gateway"], spoiling: Spoiling) -> Fault:
    async def fault(stand: Stand, traffic: Traffic, lasts_s: float) -> None:
        spoiled_link = getattr(stand, link)
        async with cutting(stand) if link == "to_gateway" else nullcontext():
            spoiled_link.spoil(spoiling)
            await asyncio.sleep(lasts_s)
            spoiled_link.reset_all()
            spoiled_link.spoil(CLEAN)
        await recovered(stand, traffic)

    return fault


def stopped(process_of: Callable[[Stand], psutil.Process]) -> Fault:
    async def fault(stand: Stand, traffic: Traffic, lasts_s: float) -> None:
        process = process_of(stand)
        process.suspend()
        await asyncio.sleep(lasts_s)
        process.resume()
        await recovered(stand, traffic)

    return fault


async def triton_killed(stand: Stand, traffic: Traffic, _lasts_s: float) -> None:
    """The fixture starts it again."""
    killed = kill_triton(stand.triton)
    await asyncio.to_thread(eventually, lambda: stand.triton.pid != killed and answers_ready(stand.triton), RECOVERY_S)
    await recovered(stand, traffic)


async def recovered(stand: Stand, traffic: Traffic) -> None:
    """Waits until the gateway is ready, and requests of every dialect work again.

    A worker notices that Redis is back at its next heartbeat, so with Redis they have to work for longer than that.
    """
    await asyncio.to_thread(wait_until_ready, stand.gateway, RECOVERY_S)
    began = last_failure = time.monotonic()
    working = 0
    while working < 12 or (stand.redis and time.monotonic() < last_failure + 3 * HEARTBEAT_S):
        assert time.monotonic() < began + RECOVERY_S, "requests do not work again"
        ask, manner = next(traffic.calm(1))
        works = ask.expected in (await stand.ask(ask, manner)).outcomes
        working = working + 1 if works else 0
        if not works:
            last_failure = time.monotonic()
            await asyncio.sleep(0.1)


def stub_killed(model: str) -> Fault:
    """The gateway reloads the model."""

    async def fault(stand: Stand, traffic: Traffic, _lasts_s: float) -> None:
        deaths = stand.gateway.metric("stub_deaths_total")
        for process in processes_of(stand.triton.pid, model):
            os.kill(process, signal.SIGKILL)

        def is_repaired() -> bool:
            return stand.gateway.metric("stub_deaths_total") > deaths

        await asyncio.to_thread(eventually, is_repaired, RECOVERY_S)
        await recovered(stand, traffic)

    return fault


async def overload(stand: Stand, traffic: Traffic, _lasts_s: float) -> None:
    """More connections at once than the gateway allows."""
    await stand.load(traffic.calm(300), clients=300)


async def more_than_slots(stand: Stand, traffic: Traffic, _lasts_s: float) -> None:
    """More requests than the model's slots and its queue can hold."""
    begun = len(stand.seen)
    await stand.load(traffic.slow(100), clients=80)
    assert any(Outcome.REJECTED in seen.outcomes and seen.is_counted for seen in stand.seen[begun:])


async def stalled_readers(stand: Stand, traffic: Traffic, lasts_s: float) -> None:
    await asyncio.gather(
        *(stand.ask(traffic.endless(), Manner(stalls_s=3 + lasts_s, leaves_after_received=1)) for _ in range(8))
    )


async def no_descriptors(stand: Stand, _traffic: Traffic, lasts_s: float) -> None:
    """The gateway cannot accept connections; those in the kernel's queue are served later."""
    pid = stand.gateway.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    async with cutting(stand):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (stand.process.num_fds(), before[1]))
        await asyncio.sleep(lasts_s)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def reloads(key: str, changed: str) -> Fault:
    """A valid change, an invalid file, and the original file."""

    async def fault(stand: Stand, _traffic: Traffic, lasts_s: float) -> None:
        good = stand.config.read_text()
        for text in (good.replace(key, changed), "pipelines: [", good):
            stand.config.write_text(text)
            await asyncio.sleep(lasts_s)

    return fault


async def worker_killed(stand: Stand, _traffic: Traffic, _lasts_s: float) -> None:
    """The supervisor replaces it while the next faults happen."""
    await asyncio.to_thread(eventually, lambda: has_all_workers(stand.gateway), RECOVERY_S)
    deaths = deaths_of(stand.gateway)
    worker = workers_of(stand.gateway)[int(deaths) % 2]
    stand.faults.kills.append(await asyncio.to_thread(killed, worker, stand.port))
    await asyncio.to_thread(eventually, lambda: deaths_of(stand.gateway) > deaths, RECOVERY_S)


def killed(worker: int, port: int) -> Kill:
    """Stops the worker first, so that its connections do not change between the listing and the kill.

    Connections that no process has accepted yet may be in its queue: the system resets those, too.
    """
    process, began = psutil.Process(worker), time.monotonic()
    process.suspend()
    eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    listed = time.monotonic()
    found = [*process.net_connections("tcp"), *(each for each in psutil.net_connections("tcp") if each.pid is None)]
    process.kill()
    eventually(lambda: not process.is_running())  # its sockets are open until its last thread has ended
    ports = frozenset(each.raddr.port for each in found if each.laddr.port == port and each.raddr)
    return Kill(began, time.monotonic(), ports, listed)


async def redis_killed(stand: Stand, traffic: Traffic, lasts_s: float, *, with_worker: bool = False) -> None:
    """Redis is away for a while, and has its data when it starts again.

    A worker that is killed at the same time is replaced before, unless that takes longer than MOST_AWAY_S.
    """
    assert stand.redis is not None
    await asyncio.to_thread(stand.redis.stop, signal.SIGKILL)
    if with_worker:
        ends = time.monotonic() + MOST_AWAY_S
        await worker_killed(stand, traffic, lasts_s)
        while time.monotonic() < ends and not await asyncio.to_thread(has_all_workers, stand.gateway):
            await asyncio.sleep(0.1)
    else:
        await asyncio.sleep(lasts_s)
    await asyncio.to_thread(stand.redis.start)
    await recovered(stand, traffic)


FAULTS: dict[str, Fault] = {
    "Triton is stopped": stopped(lambda stand: psutil.Process(stand.triton.pid)),
    **{f"link to Triton: {name}": spoiled("to_triton", each) for name, each in SPOILINGS.items()},
    **{f"link to clients: {name}": spoiled("to_gateway", each) for name, each in SPOILINGS.items()},
    "more connections than allowed": overload,
    "more requests than slots": more_than_slots,
    "stalled readers": stalled_readers,
    "no descriptors": no_descriptors,
    "log pipe blocked": stopped(lambda stand: stand.log_pipe),
    "gateway.yaml changes": reloads("timeout_s: 4", "timeout_s: 5"),
    "process of a model killed": stub_killed("scripted"),
    "Triton is killed": triton_killed,
}
"""For a gateway with one process."""
WORKER_FAULTS: dict[str, Fault] = {
    "worker killed": worker_killed,
    "Redis is stopped": stopped(lambda stand: psutil.Process(stand.redis.process.pid)),
    "Redis is killed": redis_killed,
    "Redis and a worker are killed": partial(redis_killed, with_worker=True),
    "Triton is stopped": FAULTS["Triton is stopped"],
    "Triton is killed": triton_killed,
    "link to Triton: resets": FAULTS["link to Triton: resets"],
    "gateway.yaml changes": FAULTS["gateway.yaml changes"],
    "log pipe blocked": FAULTS["log pipe blocked"],
}
"""For a gateway with two workers and Redis. Its clients connect directly, so only a kill may break a connection."""
SHARING_FAULTS: dict[str, Fault] = {
    "link to Triton: delay": FAULTS["link to Triton: delay"],
    "link to Triton: blackhole": FAULTS["link to Triton: blackhole"],
    "link to Triton: resets": FAULTS["link to Triton: resets"],
    "Triton is stopped": FAULTS["Triton is stopped"],
    "Triton is killed": triton_killed,
    "process of a model killed": stub_killed("good"),
    "requests share no calls for a while": reloads("coalesce: true", "coalesce: false"),
}
"""For a gateway whose requests share calls to Triton."""
