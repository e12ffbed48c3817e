"""The results of a benchmark as a table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """``note`` explains the measurement, the comparison and the aim."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        """Returns GitHub's markdown."""
        head, *lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, *self.rows)]
        note = [self.note, ""] if self.note else []
        return "\n".join([f"## {self.title}", "", *note, head, "|---" * len(self.columns) + "|", *lines, ""])
