"""The durations of the long tests, and the parts of docs/benchmarks/chaos.md that they write."""

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
PARTS = ROOT / ARTIFACTS.parent / "chaos"


def write_ledger(part: str, title: str, stand: Stand, before: Levels, after: Levels) -> None:
    ledger = stand.ledger()
    rows: Counter[tuple[str, ...]] = Counter()
    for row, count in ledger.rows().items():
        rows[row[1:]] += count
    dialects = Counter(entry.seen.ask.dialect for entry in ledger.entries)
    sums = ", ".join(f"{name} {count:,}" for name, count in dialects.most_common())
    write_part(
        part,
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_part(name: str, text: str) -> None:
    PARTS.mkdir(parents=True, exist_ok=True)
    Path(PARTS / f"{name}.md").write_text(text)
