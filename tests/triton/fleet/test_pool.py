"""The servers of a balancer follow the addresses of a scripted resolver; those that are down or slow are ejected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.core.inference import Deadline, InferenceRequest
from app.triton.connect import addresses_of, is_name
from app.triton.fleet import pool as module
from app.triton.fleet.balancer import Balancer, TritonServer
from app.triton.fleet.pool import ENOUGH, ServerPool, resolve, slow_servers
from tests.toolkit.engine import FakeEngine
from tests.toolkit.waiting import until
from tests.toolkit.watches import Samples, running
from tests.triton.fleet.test_balancer import ANSWER, balanced, working


class Addresses:
    """The current addresses of the name; empty if the name cannot be resolved."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.hangs = False
        self.opened: list[str] = []
        self.closed: list[str] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("triton.ns.svc", 8001)
        if not self.hosts:
            raise OSError("Name or service not known")
        await asyncio.sleep(60 if self.hangs else 0)
        return self.hosts

    @asynccontextmanager
    async def server(self, address: str) -> AsyncIterator[TritonServer]:
        self.opened.append(address)
        yield TritonServer(address, FakeEngine())
        self.closed.append(address)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RESOLVE_S": 0.02,
        "POLL_S": 0.01,
        "SHORTEST_S": 0.001,
        "SILENCE_S": 0.02,
        "FIRST_RETURN_S": 0.03,
    }.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    found = Addresses()
    monkeypatch.setattr(module, "resolve", found.resolve)
    return found


async def named(addresses: Addresses, *hosts: str) -> tuple[ServerPool, Balancer]:
    """Opens the servers of a name that has these addresses."""
    balancer, addresses.hosts = Balancer(), list(hosts)
    pool = ServerPool(("triton.ns.svc:8001",), balancer, addresses.server, Samples())
    await pool.open()
    return pool, balancer


def states(balancer: Balancer) -> dict[str, str]:
    return dict(sorted(balancer.states().items()))


async def test_addresses_join_at_once_and_leave_when_idle(addresses: Addresses) -> None:
    pool, balancer = await named(addresses, "10.0.0.1", "10.0.0.2")
    assert states(balancer) == {"10.0.0.1:8001": "up", "10.0.0.2:8001": "up"}
    assert [server.joined_at for server in balancer.servers] == [0.0, 0.0]
    first = balancer.servers[0]
    first.in_flight = 1
    async with running(pool.run()):
        addresses.hosts = ["10.0.0.2", "10.0.0.3"]
        await until(lambda: len(balancer.servers) == 3)
        await until(lambda: states(balancer)["10.0.0.3:8001"] == "up")
        assert states(balancer)["10.0.0.1:8001"] == "leaving"
        assert balancer.servers[2].joined_at > 0  # its traffic grows slowly
        first.in_flight = 0
        await until(lambda: addresses.closed == ["10.0.0.1:8001"])
    await pool.close()
    assert sorted(addresses.closed) == ["10.0.0.1:8001", "10.0.0.2:8001", "10.0.0.3:8001"]


async def test_an_address_that_returns_while_draining_is_kept(addresses: Addresses) -> None:
    pool, balancer = await named(addresses, "10.0.0.1", "::1")
    balancer.servers[0].in_flight = 1
    addresses.hosts = ["::1"]
    await pool.follow()
    addresses.hosts = ["10.0.0.1", "::1"]
    await pool.follow()
    assert states(balancer) == {"10.0.0.1:8001": "up", "[::1]:8001": "up"}
    assert len(addresses.opened) == 2


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_failing_resolver_removes_no_address(
    addresses: Addresses, caplog: pytest.LogCaptureFixture, *, hangs: bool
) -> None:
    pool, balancer = await named(addresses, "10.0.0.1")
    addresses.hosts, addresses.hangs = (["10.0.0.2"], True) if hangs else ([], False)
    for _ in range(3):
        await pool.follow()
    assert states(balancer) == {"10.0.0.1:8001": "up"}
    assert caplog.text.count("cannot be resolved") == 1


async def test_a_name_may_become_known_later(addresses: Addresses) -> None:
    pool, balancer = await named(addresses)
    assert (states(balancer), await balancer.is_live()) == ({}, False)
    async with running(pool.run()):
        addresses.hosts = ["10.0.0.1"]
        await until(lambda: states(balancer) == {"10.0.0.1:8001": "up"})


async def test_several_addresses_are_not_resolved(addresses: Addresses) -> None:
    balancer = Balancer()
    await ServerPool(("a:1", "unix:/b"), balancer, addresses.server, Samples()).open()
    assert states(balancer) == {"a:1": "up", "unix:/b": "up"}


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("127.0.0.1:8001", ("127.0.0.1:8001",)),
        ("a:1, unix:/b,[::1]:2,a:1", ("a:1", "unix:/b", "[::1]:2")),
    ],
)
def test_addresses_are_separated_by_commas(url: str, found: tuple[str, ...]) -> None:
    assert addresses_of(url) == found


@pytest.mark.parametrize(
    ("address", "may_have_several"),
    [("127.0.0.1:1", False), ("[::1]:1", False), ("localhost:1", False), ("unix:/a", False), ("triton:1", True)],
)
def test_only_a_dns_name_may_have_several_addresses(address: str, may_have_several: bool) -> None:
    assert is_name(address) is may_have_several


async def test_the_system_resolves_one_family() -> None:
    """``localhost`` has addresses of both families, which belong to one machine."""
    assert await resolve("localhost", 1) in (["127.0.0.1"], ["::1"])


@asynccontextmanager
async def watched(balancer: Balancer, *samples: str) -> AsyncIterator[None]:
    async with running(ServerPool(("a:1", "b:1"), balancer, Addresses().server, Samples(*samples)).run()):
        yield


def measured(server: TritonServer, latency_s: float, count: int = ENOUGH, model: str = "m") -> None:
    server.latencies[model].extend([latency_s] * count)


@pytest.mark.parametrize("is_silent", [False, True], ids=["a call failed", "its running requests get no answer"])
async def test_a_down_server_returns_when_it_is_live(caplog: pytest.LogCaptureFixture, *, is_silent: bool) -> None:
    engines = working(), working()
    balancer, seen = balanced(*engines)
    engines[0].is_up = False
    async with watched(balancer):
        if is_silent:
            balancer.servers[0].in_flight = 1
        else:
            balancer.suspected.set()
        await until(lambda: not balancer.servers[0].is_up)
        engines[0].is_up = True
        await until(lambda: balancer.servers[0].is_up)
    assert seen.ejections == [("triton-0:1", "down")]
    assert caplog.text.count("Triton at triton-0:1 is not used: it is down") == 1
    assert balancer.servers[0].joined_at > 0


async def test_a_slow_server_is_ejected_and_returns() -> None:
    engines = working(), working(), working()
    balancer, seen = balanced(*engines)
    measured(balancer.servers[0], 0.5)
    measured(balancer.servers[1], 0.02)
    measured(balancer.servers[2], 0.02)
    engines[0].answers = [1.0, ANSWER]
    async with watched(balancer, "m"):
        await until(lambda: balancer.states()["triton-0:1"] == "slow")
        await balancer.infer(InferenceRequest("m", ()), Deadline.after(1))
        await until(lambda: len(engines[0].requests) > 0)  # the probe is slow too
        assert balancer.states()["triton-0:1"] == "slow"
        engines[0].answers = [ANSWER]
        await until(lambda: balancer.states()["triton-0:1"] == "up")
    assert seen.ejections == [("triton-0:1", "slow")]


async def test_at_most_half_of_the_servers_are_ejected() -> None:
    balancer, seen = balanced(working(), working())
    measured(balancer.servers[0], 0.5)
    measured(balancer.servers[1], 0.02)
    async with watched(balancer):
        await until(lambda: seen.ejections == [("triton-0:1", "slow")])
        measured(balancer.servers[1], 9.0)
        await asyncio.sleep(0.05)
    assert len(seen.ejections) == 1


@pytest.mark.parametrize(
    ("latencies", "count"),
    [((0.06, 0.02, 0.02), ENOUGH), ((0.0005, 0.0001, 0.0001), ENOUGH), ((0.5, 0.02, 0.02), ENOUGH - 1)],
    ids=["three times", "far below a millisecond", "too few samples"],
)
def test_a_server_of_similar_speed_is_not_ejected(latencies: tuple[float, ...], count: int) -> None:
    balancer, _ = balanced(working(), working(), working())
    for server, latency_s in zip(balancer.servers, latencies, strict=True):
        measured(server, latency_s, count)
    assert not list(slow_servers(balancer))
