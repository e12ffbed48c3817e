"""Faults under load: the ledger balances, and nothing is left behind."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.domain.errors import Outcome
from app.triton.embedded.server import EmbeddedTriton
from tests.live.chaos.faults import FAULTS, cutting
from tests.live.chaos.report import LONG_S, SEED, write_ledger
from tests.live.chaos.stand import Levels, Stand, stand_of
from tests.live.chaos.traffic import Traffic

CALM = 150
CLIENTS = 12
PAUSE_S = 0.01
GROWTH_MIB = 8.0
SHORT = [
    "Triton is stopped",
    "link to Triton: blackhole",
    "link to Triton: resets",
    "link to clients: blackhole",
    "link to clients: resets",
    "more connections than allowed",
    "more requests than slots",
    "no descriptors",
    "log pipe blocked",
    "gateway.yaml changes",
    "Triton is killed",
]


async def test_a_round_of_faults_leaves_nothing_unexplained(mortal_triton: EmbeddedTriton, tmp_path: Path) -> None:
    async with stand_of(mortal_triton, tmp_path / "stand", SEED) as stand:
        await balanced(stand, [(name, 0.3) for name in SHORT])


@pytest.mark.full
@pytest.mark.timeout(LONG_S + 600)
async def test_a_long_run_of_faults_leaves_nothing_unexplained(mortal_triton: EmbeddedTriton, tmp_path: Path) -> None:
    async with stand_of(mortal_triton, tmp_path / "stand", SEED) as stand:
        before, after = await balanced(stand, in_any_order(time.monotonic() + LONG_S))
        write_ledger(stand, before, after)


def in_any_order(ends: float) -> Iterator[tuple[str, float]]:
    """Every fault once, each round in another order, until the time is over."""
    order = random.Random(SEED)
    while time.monotonic() < ends:
        yield from ((name, order.uniform(0.2, 3.0)) for name in order.sample(list(FAULTS), len(FAULTS)))


async def balanced(stand: Stand, faults: Iterable[tuple[str, float]]) -> tuple[Levels, Levels]:
    """The objects of the gateway before and after the faults, which are followed by a drain under load."""
    traffic = Traffic(SEED, stand.journal)
    await calm(stand, traffic)
    await stand.quiet()
    before = await asyncio.to_thread(stand.levels)
    await chaos(stand, traffic, faults)
    await calm(stand, traffic)
    await stand.quiet()
    after = await levels_like(stand, before)
    check_sums(stand)
    await drain(stand, traffic)
    assert stand.ledger().unexplained(stand.cuts) == []
    return before, after


async def calm(stand: Stand, traffic: Traffic) -> None:
    """Without a fault every client receives the scripted answer."""
    begun = len(stand.seen)
    await stand.load(traffic.calm(CALM), CLIENTS)
    for seen in stand.seen[begun:]:
        assert seen.ask.expected in seen.outcomes, seen


async def chaos(stand: Stand, traffic: Traffic, faults: Iterable[tuple[str, float]]) -> None:
    """Each fault under load: (its name, how long it lasts)."""
    async with loading(stand, traffic):
        for name, lasts_s in faults:
            await FAULTS[name](stand, traffic, lasts_s)


@asynccontextmanager
async def loading(stand: Stand, traffic: Traffic) -> AsyncIterator[None]:
    """Clients send one request after the other for the duration of the block, directly and through the link."""
    is_over = False

    async def client(port: int) -> None:
        while not is_over:
            await stand.ask(*traffic.ask(), port=port)
            await asyncio.sleep(PAUSE_S)

    ports = [stand.port] * CLIENTS + [stand.to_gateway.port] * CLIENTS
    clients = [asyncio.create_task(client(port)) for port in ports]
    yield
    is_over = True
    await asyncio.gather(*clients)


async def levels_like(stand: Stand, before: Levels) -> Levels:
    """Waits until the gateway has no more objects than before."""
    after = before
    for _ in range(100):
        after = await asyncio.to_thread(stand.levels)
        if after.holds_no_more_than(before):
            break
        await asyncio.sleep(0.2)
    assert after.holds_no_more_than(before), (before, after)
    assert after.threads <= before.threads + 2
    assert after.rss_mib <= before.rss_mib + GROWTH_MIB
    return after


def check_sums(stand: Stand) -> None:
    """The sums of the gateway's metrics: exact, or as exact as the other sides can know them."""
    ledger, gateway = stand.ledger(), stand.gateway
    assert ledger.unexplained(stand.cuts) == []
    counted = {outcome: gateway.metric("requests_total", outcome=outcome) for outcome in Outcome}
    assert {outcome: count for outcome, count in counted.items() if count} == ledger.outcomes()
    fewest, most = ledger.calls()
    assert fewest <= gateway.metric("triton_calls_total") <= most + gateway.metric("triton_repeats_total")
    refused = gateway.metric("rejected_total", reason="too_many_requests") - ledger.codes()["too_many_requests"]
    assert 0 <= refused - ledger.refused_connections() <= ledger.unread()
    assert gateway.metric("log_lines_dropped_total") == 0


async def drain(stand: Stand, traffic: Traffic) -> None:
    """SIGTERM under load. The metrics end with the gateway, so only its log is compared."""
    async with cutting(stand), loading(stand, traffic):
        await asyncio.sleep(0.3)
        stand.gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stand.gateway.process.wait, 20) == 0
