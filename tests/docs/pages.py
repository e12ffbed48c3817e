"""Reads the project's Markdown: tables by heading, code blocks, links."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "site"]
ALL_PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
"""Every Markdown file of the repository."""

Row = tuple[str, ...]


def rows_under(page: str, heading: str) -> list[Row]:
    """Returns the unchanged cells of the first table under a heading, without the table's head."""
    section = re.split(rf"^#+ {re.escape(heading)}$", (ROOT / page).read_text(), maxsplit=1, flags=re.M)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert table, f"{page} has no table under '{heading}'"
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table[0].splitlines()[2:]]


def blocks_of(page: Path, skipped: str = "") -> list[tuple[str, str]]:
    """Returns (language, text) of every fenced block. Leaves out the sections whose headings start with ``skipped``."""
    text = page.read_text()
    if skipped:
        text = re.sub(rf"^## {re.escape(skipped)}.*?(?=^## |\Z)", "", text, flags=re.M | re.S)
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
