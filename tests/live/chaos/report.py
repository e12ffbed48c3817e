"""``make chaos``: runs the long tests, prints a summary and writes it to docs/benchmarks/chaos.md.

The full ledgers are in artifacts/chaos.
CHAOS_S, CHAOS_HOSTILE, CHAOS_REQUESTS, CHAOS_KEPT_S, CHAOS_CLOSED_S and CHAOS_SEED set the duration and the requests.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.surroundings import ARTIFACTS, ROOT, machine, surroundings, versions
from benchmarks.table import Table
from tests.live.chaos.stand import Levels, Stand

SEED = int(os.environ.get("CHAOS_SEED", "14"))
LONG_S = float(os.environ.get("CHAOS_S", "180"))
"""Duration of the faults in seconds, for each of the ledgers."""
HOSTILE = int(os.environ.get("CHAOS_HOSTILE", "200000"))
"""Generated hostile requests."""
REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "200000"))
"""Requests with measured memory."""
KEPT_S = float(os.environ.get("CHAOS_KEPT_S", "300"))
"""Duration in seconds of the start of streams without a reader."""
CLOSED_S = float(os.environ.get("CHAOS_CLOSED_S", "120"))
"""Duration in seconds of connections with large messages, one after the other."""
PARTS = ROOT / ARTIFACTS.parent / "chaos"
"""The folder of the ledgers, and of the rows as JSON. Git ignores it."""
PAGE = ROOT / "docs" / "benchmarks" / "chaos.md"
WHAT = (
    "Clients send requests of every dialect while faults happen ([the tests](../../tests/live/chaos/README.md)). "
    "Then each request is compared: what its client received, what the gateway counted, and what the model noted. "
    "*Unexplained* is a request with a difference that no rule allows. *Left*: the client disconnected; *lost*: a "
    "fault cut its connection. Two numbers are those of the gateway and of Redis. "
    "Answers of calls that are shared prove whose they are. The gateway with large messages collects no garbage. "
    f"Seed {SEED}."
)
STREAMS = frozenset({"stream", "resumable", "generate_stream", "openai", "stalled", "websocket"})
"""The dialects whose answers are streams of events."""

Row = Sequence[str]


def main() -> int:
    for part in PARTS.glob("*.*"):
        part.unlink()
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CHAOS_")]
    command = f"`{' '.join(['make chaos', *given])}`"
    head = f"# chaos\n\n{command}, {surroundings()}\n\n{machine()}\n\n{versions()}\n\n{WHAT}\n\n"
    tests = (sys.executable, "-m", "pytest", Path(__file__).parent, "-m", "full", "-q", "--show-capture=no")
    status = subprocess.run(tests, check=False).returncode
    rows = [row for part in sorted(PARTS.glob("*.json")) for row in json.loads(part.read_text())]
    text = f"{head}{Table('Results', ['', 'requests', 'result', 'resident memory, MiB'], rows)}"
    sys.stdout.write(f"{text}\nThe ledgers are in {PARTS}\n")
    if status == 0:
        PAGE.write_text(text)
    return status


def write_part(name: str, *rows: Row) -> None:
    """Writes rows of the page: what was sent, how many requests, the result, and the memory."""
    PARTS.mkdir(parents=True, exist_ok=True)
    Path(PARTS / f"{name}.json").write_text(json.dumps(rows))


def write_ledger(part: str, title: str, stand: Stand, before: Levels, after: Levels) -> None:
    """Writes a row of the page, and the whole ledger."""
    ledger = stand.ledger()
    rows: Counter[tuple[str, ...]] = Counter()
    for row, count in ledger.rows().items():
        rows[row[1:]] += count
    endings: Counter[str] = Counter()  # the first words of the clients' endings
    for (client, *_), count in rows.items():
        endings[client.split()[0]] += count
    levels = [
        ("tasks", sum(before.tasks.values()), sum(after.tasks.values())),
        ("gRPC calls", before.calls, after.calls),
        ("descriptors", before.descriptors, after.descriptors),
        ("threads", before.threads, after.threads),
    ]
    dialects = Counter(entry.seen.ask.dialect for entry in ledger.entries)
    streams = sum(count for name, count in dialects.items() if name in STREAMS)
    result = [
        f"{_listed(endings)}; **{len(ledger.unexplained())} unexplained**",
        ", ".join(f"{name} {first} -> {last}" for name, first, last in levels),
    ]
    done = f"{LONG_S:g} s of faults: {len(ledger.entries):,} ({streams:,} streams)"
    memory = f"{before.rss_mib:.1f} -> {after.rss_mib:.1f}"
    write_part(part, (title, done, "; ".join(result), memory))
    columns = ["the client", "the gateway counted", "the model noted", "requests", "explained by"]
    lines = [[*row[:3], f"{count:,}", row[3]] for row, count in sorted(rows.items())]
    sent = f"Seed {SEED}; {done}, then a drain under load. Requests by dialect: {_listed(dialects)}."
    found = Table(f"{title}: ledger of {len(ledger.entries):,} requests", columns, lines, sent)
    Path(PARTS / f"{part}.md").write_text(f"{found}\n{result[1]}; resident memory {memory} MiB\n")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


if __name__ == "__main__":
    raise SystemExit(main())
