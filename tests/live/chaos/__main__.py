"""``make chaos``: runs the long tests, prints a summary and writes it to docs/benchmarks/chaos.md.

The full ledgers are in artifacts/chaos.
CHAOS_S, CHAOS_HOSTILE, CHAOS_REQUESTS, CHAOS_KEPT_S, CHAOS_CLOSED_S and CHAOS_SEED set the duration and the requests.
"""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.surroundings import ROOT, machine, surroundings, versions
from tests.live.chaos.report import CLOSED_S, HOSTILE, KEPT_S, LONG_S, PARTS, REQUESTS, SEED, summary

PAGE = ROOT / "docs" / "benchmarks" / "chaos.md"


def main() -> int:
    for part in PARTS.glob("*.*"):
        part.unlink()
    head = f"# chaos\n\n{_command()}, {surroundings()}\n\n{machine()}\n\n{versions()}\n\n{_what()}\n\n"
    status = pytest.main([str(Path(__file__).parent), "-m", "full", "-q", "--show-capture=no"])
    text = head + summary()
    sys.stdout.write(f"{text}\nThe ledgers are in {PARTS}\n")
    if status == 0:
        PAGE.write_text(text)
    return int(status)


def _command() -> str:
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CHAOS_")]
    return f"`{' '.join(['make chaos', *given])}`"


def _what() -> str:
    return (
        "Clients send requests of every dialect while faults happen ([the tests](../../tests/live/chaos/README.md)). "
        "Then each request is compared: what its client received, what the gateway counted, and what the model noted. "
        "*Unexplained* is a request with a difference that no rule allows. *Left*: the client disconnected; *lost*: a "
        "fault cut its connection. Two numbers are those of the gateway and of Redis. "
        f"Seed {SEED}; {LONG_S:g} s of faults for one process, as long for two workers and Redis, and for requests "
        "that share calls, whose answers prove whose they are; "
        f"{HOSTILE:,} hostile requests; memory over {REQUESTS:,} requests; "
        f"{KEPT_S:g} s of resumable streams that nobody reads, for each store; "
        f"{CLOSED_S:g} s of connections with large messages, in a gateway that collects no garbage."
    )


if __name__ == "__main__":
    raise SystemExit(main())
