"""`python -m benchmarks [NAME ...] [--rounds N]`: prints markdown tables and writes them to artifacts/benchmarks/."""

import argparse
import sys
from collections.abc import Awaitable, Callable, Sequence

import uvloop

from benchmarks import bls, early_exit, fan_out, router, sse_peers, streams, transports
from benchmarks.micro import run as micro
from benchmarks.peers import run as peers
from benchmarks.surroundings import ARTIFACTS, surroundings
from benchmarks.table import Table

Run = Callable[[int], Awaitable[Sequence[Table]]]

BENCHMARKS: dict[str, Run] = {
    "micro": micro.run,
    "peers": peers.run,
    "fan-out": fan_out.run,
    "router": router.run,
    "bls": bls.run,
    "early-exit": early_exit.run,
    "streams": streams.run,
    "sse-peers": sse_peers.run,
    "transports": transports.run,
}


def main() -> None:
    """Run the benchmarks named, or all, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; all where none is")
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each case (default 30)")
    given = parser.parse_args()
    if unknown := set(given.names) - BENCHMARKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    for name in given.names or BENCHMARKS:
        scale = f"{given.rounds} rounds. Median (10th to 90th percentile); milliseconds if no unit is given."
        text = f"## {name}\n\n{surroundings()}, {scale}\n\n"
        text += "\n".join(str(table) for table in uvloop.run(BENCHMARKS[name](given.rounds)))
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        (ARTIFACTS / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
