"""`python -m benchmarks [NAME ...]`: prints markdown tables, and writes them with their charts to a folder."""

import argparse
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks import coalescing, entered, sessions, steps, streams, under_load, workers
from benchmarks.attacks import bodies, connections
from benchmarks.figure import Figure
from benchmarks.micro import run as micro
from benchmarks.peers import run as peers
from benchmarks.surroundings import ARTIFACTS, machine, surroundings, versions
from benchmarks.table import Table
from benchmarks.tritons import run as tritons


@dataclass(frozen=True)
class Benchmark:
    run: Callable[[int], Awaitable[Sequence[Table | Figure]]]
    rounds: int


BENCHMARKS = {
    "micro": Benchmark(micro.run, 40),
    "peers": Benchmark(peers.run, 5),
    "streams": Benchmark(streams.run, 6),
    "load": Benchmark(under_load.run, 10),
    "tritons": Benchmark(tritons.run, 1),
    "coalescing": Benchmark(coalescing.run, 5),
    "sessions": Benchmark(sessions.run, 7),
    "workers": Benchmark(workers.run, 10),
    "steps": Benchmark(steps.run, 5),
    "entered": Benchmark(entered.run, 5),
    "bodies": Benchmark(bodies.run, 3),
    "connections": Benchmark(connections.run, 1),
}
STANDARD = ("micro", "peers")
"""The benchmarks that run without arguments. They take about ten minutes on two cores."""


def main() -> None:
    """Runs the given benchmarks, or the standard ones, one after the other."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # also stops the servers
    for name in given.names or STANDARD:
        rounds = given.rounds or BENCHMARKS[name].rounds
        before = surroundings()
        found = uvloop.run(BENCHMARKS[name].run(rounds))
        text = "\n".join([_head(name, rounds, before), *map(str, found)])
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        _write(given.write, name, text, found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = f"of {', '.join(BENCHMARKS)}; default {', '.join(STANDARD)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--rounds", type=int, help="measurements of each case; each benchmark has its own default")
    parser.add_argument("--write", type=Path, default=ARTIFACTS, metavar="FOLDER", help=f"default {ARTIFACTS}")
    given = parser.parse_args()
    if unknown := set(given.names) - BENCHMARKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    return given


def _head(name: str, rounds: int, before: str) -> str:
    command = f"`python -m benchmarks {name} --rounds {rounds}`"
    return f"# {name}\n\n{command}, {before}\n\n{machine()}\n\n{versions()}\n"


def _write(folder: Path, name: str, text: str, found: Sequence[Table | Figure]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    for figure in found:
        if isinstance(figure, Figure):
            (folder / figure.file).write_text(figure.svg)


if __name__ == "__main__":
    main()
