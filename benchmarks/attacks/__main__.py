"""`python -m benchmarks.attacks [NAME ...]`: prints markdown tables and writes them to artifacts/benchmarks/.

Starts and attacks gateways with a Triton that runs no models, or attacks the gateway of --url, --admin-url and --pid.
Attack only your own gateway on this machine.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from benchmarks.attacks import bodies, connections, stalls
from benchmarks.attacks.target import Target, Targets, own_target
from benchmarks.surroundings import ARTIFACTS, surroundings
from benchmarks.table import Table

Run = Callable[[Targets], Awaitable[Sequence[Table]]]

ATTACKS: dict[str, Run] = {"bodies": bodies.run, "connections": connections.run, "stalls": stalls.run}


def main() -> None:
    """Runs the given attacks, or all, one after the other."""
    given = _arguments()
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    for name in given.names or ATTACKS:
        text = f"# {name}\n\n{surroundings()}\n\n" + "\n".join(map(str, asyncio.run(_attack(ATTACKS[name], given))))
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        (ARTIFACTS / f"attacks-{name}.md").write_text(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--url", help="address of the gateway's API port, http://127.0.0.1:PORT")
    parser.add_argument("--admin-url", help="address of its admin port")
    parser.add_argument("--pid", type=int, help="id of its process")
    given = parser.parse_args()
    if unknown := set(given.names) - ATTACKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    if len({given.url is None, given.admin_url is None, given.pid is None}) > 1:
        parser.error("--url, --admin-url and --pid must be used together")
    return given


async def _attack(run: Run, given: argparse.Namespace) -> Sequence[Table]:
    if given.url is None:
        return await run(own_target)
    return await run(lambda: nullcontext(Target(given.url, given.admin_url, given.pid)))


if __name__ == "__main__":
    main()
