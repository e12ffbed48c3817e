"""`python -m benchmarks micro`: tables, and a file for `pyperf compare_to`.

``BENCHMARK_PYTHON``: another interpreter with the same packages, which measures the small POST too.
"""

import json
import os
import subprocess
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
    requests, parts = await measured(rounds)
    _write_for_pyperf(requests | parts)
    other = os.environ.get("BENCHMARK_PYTHON")
    return [
        table("One small POST in process", requests, GOAL),
        *([] if other is None else [_with_other(other, rounds)]),
        table("Parts of the gateway's request", parts),
    ]


async def measured(rounds: int) -> tuple[dict[str, Durations], dict[str, Durations]]:
    """Returns the times of whole requests, and of the parts of the gateway's request."""
    async with served() as gateway:
        with heap_as_served():
            return await cpu_of(cases.requests(gateway), rounds), await cpu_of(cases.parts(gateway), rounds)


def _with_other(python: str, rounds: int) -> Table:
    written = subprocess.run(
        [python, "-m", "benchmarks.micro", str(rounds)], stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    found = json.loads(written)
    times = {name: Durations(tuple(seconds)) for name, seconds in found["seconds"].items()}
    return table(f"The same with another interpreter: {found['interpreter']}", times)


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
