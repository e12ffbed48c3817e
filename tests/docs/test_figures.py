"""Every measured figure of README and of the how-to pages is on the benchmark page that its section links."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

BENCHMARKS = ROOT / "docs" / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
LINK = re.compile(r"benchmarks/([a-z0-9-]+\.md)")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(rf"(?<![\w.,-])({NUMBER})(?= ?(?:ms|µs|times|requests/s|KiB|%)\b)")
CALCULATED = re.compile(r"at most|an estimate")
"""A line that says that it calculates its figures."""


def sections_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yields the heading and the text of each section that links a benchmark page, without blocks of code."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for section in re.split(r"(?m)^(?=## )", text):
        if LINK.search(section):
            yield section.splitlines()[0], section


def figures_of(section: str) -> list[str]:
    return [figure for line in section.splitlines() if not CALCULATED.search(line) for figure in FIGURE.findall(line)]


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


def test_the_figures_are_found() -> None:
    assert len([figure for page in PAGES for _, section in sections_of(page) for figure in figures_of(section)]) > 20


@pytest.mark.parametrize(
    ("figure", "found"), [("1.90", True), ("1.9", True), ("1.91", False), ("0.26", True), ("2,900", True)]
)
def test_a_figure_may_be_rounded(figure: str, found: bool) -> None:
    assert is_measured(figure, frozenset({1.9, 260.0, 2899.0})) == found
