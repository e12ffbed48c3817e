"""Measures the CPU time of interleaved cases. Unlike wall time it hardly depends on other load on the machine."""

import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from app.process.serving import YOUNG_OBJECTS
from benchmarks.spread import Spread

Case = Callable[[int], Awaitable[object]]
"""Runs one case this number of times."""
BATCH_S = 0.01
"""CPU time of one measurement: the case runs as often as fits."""


@contextmanager
def heap_as_served() -> Iterator[None]:
    """Applies the garbage collector's settings of a running gateway, for all cases."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def cpu_of(cases: Mapping[str, Case], rounds: int) -> dict[str, Spread]:
    """Returns the CPU seconds for one run of each case, measured once per round in a random order."""
    counts = {name: await _fitting_count(case) for name, case in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        gc.collect()
        for name in random.sample(list(cases), len(cases)):
            seconds[name].append(await _seconds_of(cases[name], counts[name]) / counts[name])
    return {name: Spread(values) for name, values in seconds.items()}


async def _fitting_count(case: Case) -> int:
    count = 1
    while await _seconds_of(case, count) < BATCH_S:
        count *= 2
    return count


async def _seconds_of(case: Case, count: int) -> float:
    """Returns the CPU time of all threads of this process, including the log's writer."""
    start = time.process_time()
    await case(count)
    return time.process_time() - start
