"""The memory of the gateway does not grow with the number of requests."""

import asyncio
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.client import RESUMABLE, WEBSOCKET, Ask
from tests.live.chaos.hostile.heads import Hostile
from tests.live.chaos.hostile.sender import Sender
from tests.live.chaos.report import REQUESTS, SEED, table, write_part
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
        traffic = Traffic(SEED, stand.journal)
        rss_mib = {
            "small": await measured(stand, small(traffic), SMALL_STEP),
            "mixed": await measured(stand, mixed(traffic), MIXED_STEP),
        }
    write_memory(rss_mib)
    for each in rss_mib.values():
        assert each[-1] - each[WARM_STEPS - 1] < MAX_GROWTH_MIB


def small(traffic: Traffic) -> Iterator[Ask]:
    """The same request repeatedly."""
    ask = traffic.smallest()
    while True:
        yield ask


def mixed(traffic: Traffic) -> Iterator[Ask]:
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


def write_memory(rss_mib: dict[str, list[float]]) -> None:
    rows = [
        [f"{name}, {step:,} a step", *(f"{each:.1f}" for each in rss_mib[name]), growth(rss_mib[name], step)]
        for name, step in (("small", SMALL_STEP), ("mixed", MIXED_STEP))
    ]
    summary = [
        (
            f"Memory, {row[0]}",
            f"{step * STEPS:,}",
            f"{row[-1]} MiB for each 10,000 requests",
            f"{row[WARM_STEPS]} -> {row[STEPS]}",
        )
        for row, step in zip(rows, (SMALL_STEP, MIXED_STEP), strict=True)
    ]
    columns = ["MiB after step", *(str(index + 1) for index in range(STEPS)), "for each 10,000"]
    write_part(
        "3-memory",
        summary,
        f"## Resident memory over {REQUESTS:,} requests\n\n"
        f"{SENDERS} kept connections. Small: the same unary request repeatedly; then mixed: every dialect and outcome. "
        f"The last column is the slope after the first {WARM_STEPS} steps of the kind.\n\n" + table(columns, rows),
    )


def growth(values: list[float], step: int) -> str:
    return f"{slope(values[WARM_STEPS:]) * 10_000 / step:+.3f}"


def slope(values: list[float]) -> float:
    """Returns the slope of the least-squares line, per step."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    across = sum((index - middle) ** 2 for index in range(len(values)))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / across
