"""``make chaos``: runs the long tests, prints the results, and writes docs/benchmarks/chaos.md.

CHAOS_S, CHAOS_HOSTILE, CHAOS_REQUESTS, CHAOS_KEPT_S and CHAOS_SEED set the duration and the requests.
"""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.surroundings import ROOT, machine, surroundings, versions
from tests.live.chaos.report import HOSTILE, KEPT_S, LONG_S, PARTS, REQUESTS

PAGE = ROOT / "docs" / "benchmarks" / "chaos.md"


def main() -> int:
    for part in PARTS.glob("*.md"):
        part.unlink()
    head = f"# chaos\n\n{_command()}, {surroundings()}\n\n{machine()}\n\n{versions()}\n\n{_what()}\n"
    status = pytest.main([str(Path(__file__).parent), "-m", "full", "-q", "--show-capture=no"])
    text = "\n".join([head, *(part.read_text() for part in sorted(PARTS.glob("*.md")))])
    sys.stdout.write(f"{text}\n")
    if status == 0:
        PAGE.write_text(text)
    return int(status)


def _command() -> str:
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CHAOS_")]
    return f"`{' '.join(['make chaos', *given])}`"


def _what() -> str:
    return (
        "The faults, the rules that explain a difference, and the hostile requests are in `tests/live/chaos/`: "
        "`faults.py`, the docstring of `ledger.py`, and `hostile/`. "
        f"{LONG_S:g} s of faults for one process, and as long for two workers and Redis; "
        f"{HOSTILE:,} hostile requests; memory over {REQUESTS:,} requests; "
        f"{KEPT_S:g} s of resumable streams that nobody reads, for each store."
    )


if __name__ == "__main__":
    raise SystemExit(main())
