"""Reports the progress of model loading on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Loading:
    """`ready` of `total` models are ready. `model`: the model that became ready last; None before the first."""

    ready: int
    total: int
    model: str | None = None

    def __str__(self) -> str:
        counted = f"{self.ready} of {self.total} models ready"
        return f"{counted}: {self.model}" if self.model else counted


OnProgress = Callable[[Loading], None]


def changes_only(on_progress: OnProgress) -> OnProgress:
    """Returns a callback that calls `on_progress` only when the progress has changed."""
    last: Loading | None = None

    def pass_on(loading: Loading) -> None:
        nonlocal last
        if loading != last:
            on_progress(loading)
        last = loading

    return pass_on


@contextmanager
def shown_on(console: Console, say: Callable[[str], None]) -> Iterator[OnProgress]:
    """Returns a callback that draws a bar on a terminal, and calls ``say`` with lines otherwise."""
    if not console.is_terminal:
        yield lambda loading: say(f"Triton: {loading}")
        return
    columns = (TextColumn("Triton"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda loading: bar.update(
            task, completed=loading.ready, total=loading.total, description=str(loading), refresh=True
        )
