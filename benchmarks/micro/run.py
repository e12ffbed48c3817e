"""`python -m benchmarks micro`: tables, and a file for `pyperf compare_to`.

``BENCHMARK_PYTHON``: another interpreter with the same packages, which measures the small POST too: it runs this module
with the number of rounds, which writes the times as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pyperf
import uvloop

from benchmarks.micro import cases
from benchmarks.micro.cpu import cpu_of, heap_as_served
from benchmarks.micro.gateway import served
from benchmarks.spread import Spread
from benchmarks.surroundings import ARTIFACTS, interpreter
from benchmarks.table import Table

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


async def measured(rounds: int) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Returns the times of whole requests, and of the parts of the gateway's request."""
    async with served() as gateway:
        with heap_as_served():
            return await cpu_of(cases.requests(gateway), rounds), await cpu_of(cases.parts(gateway), rounds)


def _with_other(python: str, rounds: int) -> Table:
    command = [python, "-m", "benchmarks.micro.run", str(rounds)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    times = {name: Spread(seconds) for name, seconds in found["seconds"].items()}
    return table(f"The same with another interpreter: {found['interpreter']}", times)


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


if __name__ == "__main__":
    requests_only, _ = uvloop.run(measured(int(sys.argv[1])))
    seconds_of = {name: each.values for name, each in requests_only.items()}
    sys.stdout.write(json.dumps({"interpreter": interpreter(), "seconds": seconds_of}))
