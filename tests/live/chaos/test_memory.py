"""The memory of the gateway does not grow with the number of requests."""

import asyncio
import statistics
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.client import RESUMABLE, WEBSOCKET, Ask
from tests.live.chaos.hostile.heads import Hostile
from tests.live.chaos.hostile.sender import Sender
from tests.live.chaos.report import COLUMNS, REQUESTS, SEED, table, write_part
from tests.live.chaos.stand import Stand, stand_of
from tests.live.chaos.traffic import Traffic

STEPS = 10
"""Measurements of each kind."""
WARM_STEPS = 2
"""The first measurements of each kind, while the gateway still warms up."""
SMALL_STEP, MIXED_STEP = REQUESTS * 3 // 4 // STEPS, REQUESTS // 4 // STEPS
"""The number of requests between two measurements."""
SENDERS = 16
MAX_GROWTH_MIB = 6.0


@pytest.mark.full
@pytest.mark.timeout(REQUESTS / 100 + 300)
async def test_memory_does_not_grow_with_the_number_of_requests(mortal_triton: EmbeddedTriton, tmp_path: Path) -> None:
    async with stand_of(mortal_triton, tmp_path / "stand", SEED) as stand:
        small = await measured(stand, repeat(stand.traffic.smallest()), SMALL_STEP)
        mixed = await measured(stand, mixed_asks(stand.traffic), MIXED_STEP)
    rows = [row_of("small", SMALL_STEP, small), row_of("mixed", MIXED_STEP, mixed)]
    write_part("3-memory", rows, table(COLUMNS, rows))
    for rss_mib in (small, mixed):
        assert rss_mib[-1] - rss_mib[WARM_STEPS - 1] < MAX_GROWTH_MIB


def mixed_asks(traffic: Traffic) -> Iterator[Ask]:
    """Every dialect and outcome, without WebSockets and resumable streams: their clients need several steps."""
    while True:
        yield from (ask for ask, _ in traffic.calm(100) if ask.dialect not in {RESUMABLE, WEBSOCKET})


async def measured(stand: Stand, asks: Iterator[Ask], step: int) -> list[float]:
    """The resident memory in MiB after each step."""
    senders = [Sender(stand.port) for _ in range(SENDERS)]
    found = []
    for _ in range(STEPS):
        work = islice(asks, step)
        await asyncio.gather(*(send_all(sender, work) for sender in senders))
        await stand.quiet()
        found.append(stand.process.memory_info().rss / 2**20)
    for sender in senders:
        await sender.close()
    return found


async def send_all(sender: Sender, asks: Iterator[Ask]) -> None:
    for ask in asks:
        content = ask.content.replace(b"Connection: close\r\n", b"", 1)
        reply = await sender.send(Hostile(ask.dialect, content))
        assert reply is not None
        assert ask.expected in ask.outcomes_of(reply), reply


def row_of(name: str, step: int, rss_mib: list[float]) -> tuple[str, ...]:
    """The growth is the slope of the least-squares line."""
    slope = statistics.linear_regression(range(WARM_STEPS, STEPS), rss_mib[WARM_STEPS:]).slope
    growth = f"{slope * 10_000 / step:+.3f} MiB for each 10,000 requests"
    return (
        f"Memory, {name}, {step:,} a step",
        f"{step * STEPS:,}",
        growth,
        f"{rss_mib[WARM_STEPS]:.1f} -> {rss_mib[-1]:.1f}",
    )
