"""Every measured figure of README and of the how-to pages is on the benchmark page that its section links."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
LINK = re.compile(r"benchmarks/([A-Za-z0-9-]+\.md)")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"(?:(?:ms|µs|times|requests/s|KiB)\b|%)"
FIGURE = re.compile(rf"(?<![\w.,-])({NUMBER})(?=(?:(?: (?:to|and|or|instead of)|,) {NUMBER})? ?{UNIT})")
"""A number with a unit, and the first of two numbers that share a unit."""
COLUMN = re.compile(r"requests/s|, ms\b|, µs\b")
"""The head of a column whose cells are figures without a unit."""
CALCULATED = re.compile(r"at most|an estimate")
"""A line that says that it calculates its figures."""


def sections_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yields the heading and the text of each section that links a benchmark page, without blocks of code."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for section in re.split(r"(?m)^(?=## )", text):
        if LINK.search(section):
            yield section.splitlines()[0], section


def figures_of(section: str) -> list[str]:
    lines = [line for line in section.splitlines() if not CALCULATED.search(line)]
    return [figure for line in [*lines, *cells_of(section)] for figure in FIGURE.findall(line)]


def cells_of(section: str) -> Iterator[str]:
    """Yields the cells of the columns that have a unit in their head, each number with a unit."""
    for table in re.findall(r"(?m)^\|.*\n\|[-| ]+\|\n(?:\|.*(?:\n|\Z))+", section):
        head, _, *rows = [line.strip("|").split("|") for line in table.splitlines()]
        for place in (place for place, name in enumerate(head) if COLUMN.search(name)):
            yield from (re.sub(rf"({NUMBER})", r"\1 requests/s", row[place]) for row in rows)


def is_measured(figure: str, measured: frozenset[float]) -> bool:
    """Whether a measured number has this value after rounding, or a thousand times this value: µs given as ms."""
    digits = len(figure.partition(".")[2])
    value = float(figure.replace(",", ""))
    step = (
        10.0**-digits
        if digits
        else 10.0 ** (len(figure) - len(figure.replace(",", "").rstrip("0")) - figure.count(","))
    )
    return any(abs(each / unit - value) <= step / 2 for each in measured for unit in (1, 1000))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_figure_is_on_the_page_that_its_section_links(page: Path) -> None:
    for heading, section in sections_of(page):
        pages = "\n".join((BENCHMARKS / name).read_text() for name in set(LINK.findall(section)))
        measured = frozenset(float(each.replace(",", "")) for each in re.findall(NUMBER, pages))
        missing = [figure for figure in figures_of(section) if not is_measured(figure, measured)]
        assert missing == [], f"{page.name}, {heading}"
