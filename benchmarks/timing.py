"""Measures interleaved calls, so that other load on the machine affects all cases equally."""

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
    """The durations of one case in seconds, in the order of the measurements."""

    seconds: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return 1000 * statistics.median(self.seconds)

    def percentile_ms(self, percent: float) -> float:
        return 1000 * percentile(self.seconds, percent)

    def __str__(self) -> str:
        """Formats the median, and the 10th to the 90th percentile."""
        return f"{self.median_ms:.1f} ({self.percentile_ms(10):.1f}-{self.percentile_ms(90):.1f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile by nearest rank."""
    return sorted(values)[round(percent / 100 * (len(values) - 1))]


def cpu_s(process: psutil.Process) -> float:
    """Returns the CPU time of the process so far in seconds, including all threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def timed(call: Call) -> float:
    """Returns the duration of one call in seconds. Its exceptions propagate."""
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def interleaved(cases: Mapping[str, Call], rounds: int, warm_up: int = 3) -> dict[str, Durations]:
    """Runs each case once per round, in a random order, so that no case always follows the same other case."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm_up + rounds):
        for name in random.sample(list(cases), len(cases)):
            duration = await timed(cases[name])
            if number >= warm_up:
                seconds[name].append(duration)
    return {name: Durations(tuple(values)) for name, values in seconds.items()}


async def together(calls: Sequence[Call]) -> tuple[Durations, float]:
    """Starts all calls at once. Returns the duration of each call, and the answers per second."""
    start = time.perf_counter()
    seconds = await asyncio.gather(*(timed(call) for call in calls))
    return Durations(tuple(seconds)), len(calls) / (time.perf_counter() - start)


def ratio(first: Durations, second: Durations) -> str:
    """Returns the ratio of the medians, with two decimals."""
    return f"{first.median_ms / second.median_ms:.2f}"
