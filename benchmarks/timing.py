"""Durations of calls that take turns, so that a noisy machine disturbs every case alike."""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Durations:
    """What one case took, in seconds, in the order measured."""

    seconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return 1000 * statistics.median(self.seconds)

    def percentile_ms(self, percent: float) -> float:
        return 1000 * percentile(self.seconds, percent)

    def __str__(self) -> str:
        """Median, and the 10th to the 90th percentile."""
        return f"{self.median_ms:.1f} ({self.percentile_ms(10):.1f}-{self.percentile_ms(90):.1f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank."""
    return sorted(values)[round(percent / 100 * (len(values) - 1))]


def cpu_s(process: psutil.Process) -> float:
    """The CPU time that the process has used, in seconds, all its threads together."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def timed(call: Call) -> float:
    """Seconds that one call takes; what it raises is raised."""
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def interleaved(cases: Mapping[str, Call], rounds: int, warm_up: int = 3) -> dict[str, Durations]:
    """Each case once a round, in an order shuffled anew, so that none always follows the same other."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm_up + rounds):
        for name in random.sample(list(cases), len(cases)):
            duration = await timed(cases[name])
            if number >= warm_up:
                seconds[name].append(duration)
    return {name: Durations(tuple(values)) for name, values in seconds.items()}


async def together(calls: Sequence[Call]) -> tuple[Durations, float]:
    """All calls started at once: how long each took, and how many were answered in a second."""
    start = time.perf_counter()
    seconds = await asyncio.gather(*(timed(call) for call in calls))
    return Durations(tuple(seconds)), len(calls) / (time.perf_counter() - start)


def ratio(first: Durations, second: Durations) -> str:
    """Of the medians, with two decimals."""
    return f"{first.median_ms / second.median_ms:.2f}"
