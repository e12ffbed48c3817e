"""`python -m benchmarks tritons`: failures, recovery and throughput with Tritons added, killed, stopped or slow."""

import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.table import Table
from benchmarks.tritons.callers import Callers
from benchmarks.tritons.fleet import INSTANCES, SLEEP_MS, Fleet, Member, fleet, until

CALLERS = {"safe": 12, "once": 12}
SETTLE_S = 7.0
"""Longer than the slow start of a Triton."""
MEASURED_S = 8.0
OUTAGE_S = 14.0
STOPPED_S = 12.0
TIMES_SLOWER = 3
FLOOR = 0.87
WINDOW_S = 0.5
MOST_FAILURES = 0.001
WITHIN_S = 60.0
NOTE = (
    f"One gateway, {sum(CALLERS.values())} closed-loop callers, half of them of a pipeline with `idempotent: true`. "
    f"The model sleeps {SLEEP_MS} ms; each Triton has {INSTANCES} instances of it. The ideal is the rate of one Triton "
    "alone behind the same gateway, times the Tritons that work (one that is three times slower counts as a third)."
)


@dataclass
class Found:
    title: str
    ideal: float
    """Requests per second."""
    rate: float = 0.0
    recovery: str = ""
    failed: Counter[str] = field(default_factory=Counter)
    """Pipeline -> requests without an answer 200."""
    total: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.rate / self.ideal


async def run(rounds: int) -> list[Table]:
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        async with fleet(Path(folder), OUTAGE_S) as tritons:
            callers = Callers(tritons.gateway.url)
            async with callers.running(CALLERS):
                for _ in range(rounds):
                    found += await _round(tritons, callers)
    return [_throughput(found), _failures(found)]


async def _round(tritons: Fleet, callers: Callers) -> list[Found]:
    first, second, third = tritons.members
    tritons.has(first)
    await _are_up(tritons, first)
    alone = await _steady(callers)
    tritons.has(first, second)
    await _are_up(tritons, first, second)
    await asyncio.sleep(SETTLE_S)

    async def healthy(phase: Found) -> None:
        phase.rate = await _steady(callers)

    phases: list[tuple[str, float, Callable[[Found], Awaitable[None]]]] = [
        ("the third is added", 3.0, lambda phase: _added(tritons, callers, phase)),
        ("all three work", 3.0, healthy),
        ("one is killed, and starts again", 2.0, lambda phase: _killed(tritons, callers, phase)),
        ("one is stopped (SIGSTOP), and continues", 2.0, lambda phase: _stopped(tritons, callers, phase)),
        (f"one is {TIMES_SLOWER} times slower", 2 + 1 / TIMES_SLOWER, lambda phase: _slow(third, callers, phase)),
    ]
    found = []
    for title, count, happen in phases:
        phase, began = Found(title, count * alone), time.monotonic()
        await happen(phase)
        for each in callers.between(began, time.monotonic()):
            phase.total[each.pipeline] += 1
            phase.failed[each.pipeline] += each.status != 200
        found.append(phase)
    return found


async def _added(tritons: Fleet, callers: Callers, phase: Found) -> None:
    third = tritons.members[2]
    before, began = await tritons.answers(third), time.monotonic()
    tritons.has(*tritons.members)

    async def has_answered() -> bool:
        return await tritons.answers(third) > before

    await until(has_answered, WITHIN_S)
    phase.recovery = f"first answer after {time.monotonic() - began:.1f} s"
    await asyncio.sleep(SETTLE_S)
    phase.rate = await _steady(callers)


async def _killed(tritons: Fleet, callers: Callers, phase: Found) -> None:
    victim = tritons.members[1]
    began = time.monotonic()
    victim.send(signal.SIGKILL)
    phase.rate = await _steady(callers)
    full_s = _full_after(callers, began, phase.ideal)
    await until(victim.is_ready, WITHIN_S)
    before, ready = await tritons.answers(victim), time.monotonic()

    async def has_answered() -> bool:
        return await tritons.answers(victim) > before

    await until(has_answered, WITHIN_S)
    answers_s = time.monotonic() - ready
    phase.recovery = f"the others at full rate after {full_s}; it answers {answers_s:.1f} s after it is ready"
    await asyncio.sleep(SETTLE_S)


async def _stopped(tritons: Fleet, callers: Callers, phase: Found) -> None:
    victim = tritons.members[2]
    began = time.monotonic()
    victim.send(signal.SIGSTOP)

    async def is_down() -> bool:
        return (await tritons.states())[victim.host] == "down"

    await until(is_down, WITHIN_S)
    down_s = time.monotonic() - began
    phase.rate = await _steady(callers)
    await asyncio.sleep(max(0.0, began + STOPPED_S - time.monotonic()))
    full_s = _full_after(callers, began, phase.ideal)
    victim.send(signal.SIGCONT)
    phase.recovery = f"ejected after {down_s:.1f} s, the others at full rate after {full_s}"
    await _are_up(tritons, *tritons.members)
    await asyncio.sleep(SETTLE_S)


async def _slow(victim: Member, callers: Callers, phase: Found) -> None:
    victim.sleep_ms(TIMES_SLOWER * SLEEP_MS)
    await asyncio.sleep(1.0)
    phase.rate = await _steady(callers)
    victim.sleep_ms(SLEEP_MS)


async def _steady(callers: Callers) -> float:
    began = time.monotonic()
    await asyncio.sleep(MEASURED_S)
    return callers.rate(began, began + MEASURED_S)


async def _are_up(tritons: Fleet, *members: Member) -> None:
    wanted = {member.host: "up" for member in members}

    async def are_up() -> bool:
        return await tritons.states() == wanted

    await until(are_up, WITHIN_S)


def _full_after(callers: Callers, began: float, ideal: float) -> str:
    """Returns the end of the first window with a rate of at least ``FLOOR`` of the ideal."""
    for step in range(int(10 / WINDOW_S * 5)):
        start = began + step * WINDOW_S / 5
        if callers.rate(start, start + WINDOW_S) >= FLOOR * ideal:
            return f"{start + WINDOW_S - began:.1f} s"
    return "more than 10 s"


def _throughput(found: list[Found]) -> Table:
    rows = [
        [
            phase.title,
            f"{phase.rate:,.0f}",
            f"{phase.ideal:,.0f}",
            f"{phase.share:.2f}",
            "reached" if phase.share >= FLOOR else "**missed**",
            phase.recovery,
        ]
        for phase in found
    ]
    columns = ["", "requests/s", "ideal", "share", f"at least {FLOOR}", "recovery"]
    return Table("Throughput and recovery", columns, rows, NOTE)


def _failures(found: list[Found]) -> Table:
    rows = [[phase.title, *_counted(phase.failed, phase.total)] for phase in found]
    failed, total = sum((phase.failed for phase in found), Counter[str]()), Counter[str]()
    for phase in found:
        total.update(phase.total)
    rows.append(["together", *_counted(failed, total)])
    is_reached = not failed["safe"] and failed["once"] <= MOST_FAILURES * total["once"]
    rows.append(["none if idempotent, else at most 0.1 %", "reached" if is_reached else "**missed**", ""])
    return Table("Requests that failed", ["", "idempotent", "not idempotent"], rows)


def _counted(failed: Counter[str], total: Counter[str]) -> list[str]:
    return [f"{failed[name]} of {total[name]:,} ({failed[name] / max(total[name], 1):.2%})" for name in CALLERS]
