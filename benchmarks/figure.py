"""Charts as SVG. Equal figures produce equal bytes."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from benchmarks.spread import Spread

COLOURS = ("#0b6e4f", "#74b49b", "#b5d6b2", "#d1495b", "#8d6a9f", "#edae49", "#8d99ae", "#c3c9d6", "#4f5d75", "#bc6c25")
"""The colours of the names in order. The first three are this gateway: with one worker, with two, and under /v2."""
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.family": "sans-serif", "font.size": 10}
BAR = 0.8
"""Width of a group of bars; the distance between groups is 1."""


@dataclass(frozen=True)
class Figure:
    """A chart. ``file``: its name, in the folder of the page that shows it."""

    title: str
    file: str
    svg: str

    def __str__(self) -> str:
        """Returns GitHub's markdown."""
        return f"![{self.title}]({self.file})\n"


def bars(title: str, file: str, groups: Sequence[str], found: Mapping[str, Sequence[Spread | None]]) -> Figure:
    """Draws a bar for each name in ``found`` in each group, with a line from the 10th to the 90th percentile."""
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(8, 4), layout="constrained")
        axes = canvas.add_subplot()
        for index, (name, spreads) in enumerate(found.items()):
            offset = (index + 0.5) * BAR / len(found) - BAR / 2
            placed = [(place + offset, each) for place, each in enumerate(spreads) if each is not None]
            if placed:
                _add_bars(axes, placed, BAR / len(found), label=name, color=COLOURS[index])
        axes.set_xticks(range(len(groups)), groups)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        canvas.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        return Figure(title, file, _svg_of(canvas))


def _svg_of(canvas: Canvas) -> str:
    text = io.StringIO()
    canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _add_bars(axes: Axes, placed: Sequence[tuple[float, Spread]], width: float, **look: str) -> None:
    places = [place for place, _ in placed]
    medians = [each.median for _, each in placed]
    spreads = [[each.median - each.low for _, each in placed], [each.high - each.median for _, each in placed]]
    axes.bar(places, medians, width, yerr=spreads, ecolor="#333333", capsize=2, **look)
