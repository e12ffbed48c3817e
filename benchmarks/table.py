"""What a benchmark found."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """``note`` says what was measured, against what, and what is aimed at."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        """GitHub's markdown."""
        rule = ["---"] * len(self.columns)
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"## {self.title}", "", *([self.note, ""] if self.note else []), *lines, ""])
