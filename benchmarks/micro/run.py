"""`python -m benchmarks micro`: tables, and a file for `pyperf compare_to`."""

from collections.abc import Mapping

import pyperf

from benchmarks.micro import cases
from benchmarks.micro.cpu import cpu_of, heap_as_served
from benchmarks.micro.gateway import served
from benchmarks.spread import Spread
from benchmarks.surroundings import ARTIFACTS
from benchmarks.table import Table

COLUMNS = ["", "CPU, µs: median (10th to 90th percentile)", "lowest"]
GOAL = " Goal for this gateway: at most 65 µs; aim: 45 µs."


async def run(rounds: int) -> list[Table]:
    """Compares whole requests with other frameworks, then measures the parts of one request."""
    async with served() as gateway:
        with heap_as_served():
            requests, parts = [await cpu_of(of(gateway), rounds) for of in (cases.requests, cases.parts)]
    _write_for_pyperf(requests | parts)
    return [table("One small POST in process", requests, GOAL), table("Parts of the gateway's request", parts)]


def table(title: str, found: Mapping[str, Spread], goal: str = "") -> Table:
    in_us = {name: Spread([1e6 * each for each in seconds.values]) for name, seconds in found.items()}
    rows = [[name, each.text(1), f"{min(each.values):,.1f}"] for name, each in in_us.items()]
    return Table(title, COLUMNS, rows, f"CPU time of the process, all threads, for one run.{goal}")


def _write_for_pyperf(found: Mapping[str, Spread]) -> None:
    suite = [
        pyperf.Benchmark([pyperf.Run(each.values, metadata={"name": name, "unit": "second"}, collect_metadata=False)])
        for name, each in found.items()
    ]
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    pyperf.BenchmarkSuite(suite).dump(str(ARTIFACTS / "micro.json"), replace=True)
