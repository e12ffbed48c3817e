"""Charts as SVG. The same figures give the same bytes."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

COLOURS = ("#0b6e4f", "#d1495b", "#8d6a9f", "#66a182", "#8d99ae")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.family": "sans-serif", "font.size": 10}
BAR = 0.8
"""Width of a group of bars; the distance of two groups is 1."""


class Spread(Protocol):
    @property
    def median(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


@dataclass(frozen=True)
class Figure:
    """``file``: its name beside the page that shows it."""

    title: str
    file: str
    svg: str

    def __str__(self) -> str:
        """GitHub's markdown."""
        return f"![{self.title}]({self.file})\n"


def bars(
    title: str, file: str, unit: str, groups: Sequence[str], found: Mapping[str, Sequence[Spread | None]]
) -> Figure:
    """Bars for each name in ``found``, one in each group; the line on a bar goes from its 10th to 90th percentile."""
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(8, 3.6), layout="constrained")
        axes = canvas.add_subplot()
        width = BAR / len(found)
        for index, (name, spreads) in enumerate(found.items()):
            there = [(place, each) for place, each in enumerate(spreads) if each is not None]
            places = [place + (index + 0.5) * width - BAR / 2 for place, _ in there]
            medians = [each.median for _, each in there]
            errors = [[each.median - each.low for _, each in there], [each.high - each.median for _, each in there]]
            colour = COLOURS[index % len(COLOURS)]
            axes.bar(places, medians, width, yerr=errors, label=name, color=colour, ecolor="#333333", capsize=2)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel(unit)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return Figure(title, file, text.getvalue())
