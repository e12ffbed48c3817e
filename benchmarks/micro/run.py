"""`python -m benchmarks micro`: tables, and a file for `pyperf compare_to`."""

from collections.abc import Mapping

import pyperf

from benchmarks.micro import cases
from benchmarks.micro.cpu import cpu_of, heap_as_served
from benchmarks.micro.gateway import served
from benchmarks.surroundings import ARTIFACTS
from benchmarks.table import Table
from benchmarks.timing import Durations

COLUMNS = ["", "CPU, µs: median (10th to 90th percentile)", "lowest"]
GOAL = " Goal for this gateway: at most 65 µs; aim: 45 µs."


async def run(rounds: int) -> list[Table]:
    """Compares whole requests with other frameworks, then measures the parts of one request."""
    async with served() as gateway:
        with heap_as_served():
            requests = await cpu_of(cases.requests(gateway), rounds)
            parts = await cpu_of(cases.parts(gateway), rounds)
    _write_for_pyperf(requests | parts)
    return [table("One small POST in process", requests, GOAL), table("Parts of the gateway's request", parts)]


def table(title: str, found: Mapping[str, Durations], goal: str = "") -> Table:
    rows = [[name, _microseconds(each), f"{min(each.seconds) * 1e6:,.1f}"] for name, each in found.items()]
    return Table(title, COLUMNS, rows, f"CPU time of the process, all threads, for one run.{goal}")


def _microseconds(found: Durations) -> str:
    low, middle, high = (1000 * found.percentile_ms(percent) for percent in (10, 50, 90))
    return f"{middle:,.1f} ({low:,.1f}-{high:,.1f})"


def _write_for_pyperf(found: Mapping[str, Durations]) -> None:
    suite = pyperf.BenchmarkSuite(
        [
            pyperf.Benchmark(
                [pyperf.Run(each.seconds, metadata={"name": name, "unit": "second"}, collect_metadata=False)]
            )
            for name, each in found.items()
        ]
    )
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    suite.dump(str(ARTIFACTS / "micro.json"), replace=True)
