"""`python -m benchmarks.micro`: prints a markdown table of microseconds of CPU time per call."""

import gc
import statistics
import sys
import time

from benchmarks.micro.small_request import Part, parts
from benchmarks.surroundings import surroundings
from benchmarks.table import Table

CALLS = 2_000
ROUNDS = 40


def main() -> None:
    rows = [
        (name, f"{min(seconds) * 1e6:.2f}", f"{statistics.median(seconds) * 1e6:.2f}")
        for name, seconds in measured(parts()).items()
    ]
    columns = ("part", "µs, quickest round", "µs, median round")
    table = Table("One small request", columns, rows, f"CPU time per call, {ROUNDS} rounds of {CALLS} calls.")
    sys.stdout.write(f"{surroundings()}\n\n{table}\n")


def measured(cases: dict[str, Part]) -> dict[str, list[float]]:
    """Seconds of CPU time per call, for each round. The cases take turns, without garbage collection."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for part in cases.values():
        part(CALLS)
    gc.disable()
    for _ in range(ROUNDS):
        for name, part in cases.items():
            gc.collect()
            started = time.process_time()
            part(CALLS)
            seconds[name].append((time.process_time() - started) / CALLS)
    gc.enable()
    return seconds


if __name__ == "__main__":
    main()
