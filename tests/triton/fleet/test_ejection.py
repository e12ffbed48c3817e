"""Tritons that are down or slow are ejected and return later; the engines have scripted answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.core.inference import Deadline, InferenceRequest
from app.triton.fleet import ejection as module
from app.triton.fleet.ejection import ENOUGH, eject_slow, watch_servers
from app.triton.fleet.member import TritonServer
from tests.toolkit.watches import Samples, eventually, running
from tests.triton.fleet.test_balancer import ANSWER, Balancer, balanced, working


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POLL_S": 0.01, "SHORTEST_S": 0.001, "SILENCE_S": 0.02, "FIRST_RETURN_S": 0.03}.items():
        monkeypatch.setattr(module, name, value)


@asynccontextmanager
async def watched(balancer: Balancer, *samples: str) -> AsyncIterator[None]:
    async with running(watch_servers(balancer, Samples(*samples))):
        yield


def measured(server: TritonServer, latency_s: float, count: int = ENOUGH, model: str = "m") -> None:
    server.latencies[model].extend([latency_s] * count)


async def test_a_down_server_returns_when_it_is_live(caplog: pytest.LogCaptureFixture) -> None:
    engines = working(), working()
    balancer, seen = balanced(*engines)
    engines[0].is_up = False
    async with watched(balancer):
        balancer.suspected.set()
        await eventually(lambda: not balancer.servers[0].is_up)
        engines[0].is_up = True
        await eventually(lambda: balancer.servers[0].is_up)
    assert seen.ejections == [("triton-0:1", "down")]
    assert caplog.text.count("Triton at triton-0:1 is not used: it is down") == 1
    assert balancer.servers[0].joined_at > 0


async def test_a_silent_server_with_requests_is_checked() -> None:
    engines = working(), working()
    balancer, _ = balanced(*engines)
    engines[0].is_up = False
    balancer.servers[0].in_flight = 1
    async with watched(balancer):
        await eventually(lambda: not balancer.servers[0].is_up)


async def test_a_slow_server_is_ejected_and_returns() -> None:
    engines = working(), working(), working()
    balancer, seen = balanced(*engines)
    measured(balancer.servers[0], 0.5)
    measured(balancer.servers[1], 0.02)
    measured(balancer.servers[2], 0.02)
    engines[0].answers = [1.0, ANSWER]
    async with watched(balancer, "m"):
        await eventually(lambda: balancer.states()["triton-0:1"] == "slow")
        await balancer.infer(InferenceRequest("m", ()), Deadline.after(1))
        await eventually(lambda: len(engines[0].requests) > 0)  # the probe is slow too
        assert balancer.states()["triton-0:1"] == "slow"
        engines[0].answers = [ANSWER]
        await eventually(lambda: balancer.states()["triton-0:1"] == "up")
    assert seen.ejections == [("triton-0:1", "slow")]


async def test_at_most_half_of_the_servers_are_ejected() -> None:
    balancer, seen = balanced(working(), working())
    measured(balancer.servers[0], 0.5)
    measured(balancer.servers[1], 0.02)
    async with watched(balancer):
        await eventually(lambda: seen.ejections == [("triton-0:1", "slow")])
        measured(balancer.servers[1], 9.0)
        await asyncio.sleep(0.05)
    assert len(seen.ejections) == 1


@pytest.mark.parametrize(
    ("latencies", "count"),
    [((0.06, 0.02, 0.02), ENOUGH), ((0.0005, 0.0001, 0.0001), ENOUGH), ((0.5, 0.02, 0.02), ENOUGH - 1)],
    ids=["three times", "far below a millisecond", "too few samples"],
)
def test_a_server_of_similar_speed_is_not_ejected(latencies: tuple[float, ...], count: int) -> None:
    balancer, seen = balanced(working(), working(), working())
    for server, latency_s in zip(balancer.servers, latencies, strict=True):
        measured(server, latency_s, count)
    eject_slow(balancer)
    assert seen.ejections == []
