"""The durations of the long tests, their ledgers, and the rows of docs/benchmarks/chaos.md."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.surroundings import ARTIFACTS, ROOT
from tests.live.chaos.stand import Levels, Stand

SEED = int(os.environ.get("CHAOS_SEED", "14"))
LONG_S = float(os.environ.get("CHAOS_S", "180"))
"""Duration of the faults in seconds, for each of the two ledgers."""
HOSTILE = int(os.environ.get("CHAOS_HOSTILE", "200000"))
"""Generated hostile requests."""
REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "200000"))
"""Requests with measured memory."""
KEPT_S = float(os.environ.get("CHAOS_KEPT_S", "300"))
"""Duration in seconds of the start of streams that nobody reads."""
CLOSED_S = float(os.environ.get("CHAOS_CLOSED_S", "120"))
"""Duration in seconds of connections with large messages, one after the other."""
PARTS = ROOT / ARTIFACTS.parent / "chaos"
"""The folder of the ledgers, and of the rows as JSON. Git ignores it."""
COLUMNS = ["", "requests", "result", "resident memory, MiB"]
STREAMS = frozenset({"stream", "resumable", "generate_stream", "openai", "stalled", "websocket"})
"""The dialects whose answers are streams of events."""

Row = Sequence[str]


def write_ledger(part: str, title: str, stand: Stand, before: Levels, after: Levels) -> None:
    ledger = stand.ledger()
    rows: Counter[tuple[str, ...]] = Counter()
    for row, count in ledger.rows().items():
        rows[row[1:]] += count
    dialects = Counter(entry.seen.ask.dialect for entry in ledger.entries)
    sums = ", ".join(f"{name} {count:,}" for name, count in dialects.most_common())
    streams = sum(count for name, count in dialects.items() if name in STREAMS)
    done = f"{LONG_S:g} s of faults: {len(ledger.entries):,}, of which {streams:,} streams"
    memory = f"{before.rss_mib:.1f} -> {after.rss_mib:.1f}"
    result = f"{_endings(rows)}; **{len(ledger.unexplained())} unexplained**; {_objects(before, after)}"
    write_part(
        part,
        [(title, done, result, memory)],
        f"## {title}: ledger of {len(ledger.entries):,} requests\n\n"
        f"Seed {SEED}; {LONG_S:g} s of faults, then a drain under load. Requests by dialect: {sums}.\n\n"
        + table(
            ["the client", "the gateway counted", "the model noted", "requests", "explained by"],
            ([*row[:3], f"{count:,}", row[3]] for row, count in sorted(rows.items())),
        )
        + f"\n**{len(ledger.unexplained())} unexplained.**\n\n"
        + f"### Objects of the {'gateway' if stand.redis is None else 'supervisor'}\n\n"
        + table(
            ["", "before", "after"],
            [
                ["asyncio tasks", str(sum(before.tasks.values())), str(sum(after.tasks.values()))],
                ["open gRPC calls", str(before.calls), str(after.calls)],
                ["descriptors", str(before.descriptors), str(after.descriptors)],
                ["threads", str(before.threads), str(after.threads)],
                ["resident memory, MiB", f"{before.rss_mib:.1f}", f"{after.rss_mib:.1f}"],
            ],
        ),
    )


def _endings(rows: Counter[tuple[str, ...]]) -> str:
    """For example ``answered 900, left 80, lost 20``: the first words of the clients' endings."""
    endings: Counter[str] = Counter()
    for (client, *_), count in rows.items():
        endings[client.split()[0]] += count
    return ", ".join(f"{ending} {count:,}" for ending, count in endings.most_common())


def _objects(before: Levels, after: Levels) -> str:
    pairs = {
        "tasks": (sum(before.tasks.values()), sum(after.tasks.values())),
        "gRPC calls": (before.calls, after.calls),
        "descriptors": (before.descriptors, after.descriptors),
        "threads": (before.threads, after.threads),
    }
    return ", ".join(f"{name} {first} -> {last}" for name, (first, last) in pairs.items())


def table(columns: Row, rows: Iterable[Row]) -> str:
    head, *lines = [f"| {' | '.join(line)} |\n" for line in (columns, *rows)]
    return "".join([head, "|---" * len(columns) + "|\n", *lines])


def write_part(name: str, rows: Sequence[Row], ledger: str) -> None:
    """Writes a ledger, and its rows of the page."""
    PARTS.mkdir(parents=True, exist_ok=True)
    Path(PARTS / f"{name}.md").write_text(ledger)
    Path(PARTS / f"{name}.json").write_text(json.dumps(rows))


def summary() -> str:
    """Returns the table with the rows of all parts."""
    return table(COLUMNS, (row for part in sorted(PARTS.glob("*.json")) for row in json.loads(part.read_text())))
