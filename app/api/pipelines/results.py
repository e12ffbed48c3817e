"""The whole answer of a pipeline's request as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.exchange import Header
from app.core.answer import Ending
from app.core.json import is_large, json_in_turns, json_of
from app.pipelines.pipeline import Pipeline


def rendered(pipeline: Pipeline, ending: Ending) -> tuple[Mapping[str, Any], Sequence[Header]]:
    """The values of the answer, and its own headers."""
    values, early_exit = ending.outputs[0], ending.early_exit
    if not pipeline.rules.rules:
        return values, ()
    return {**values, "early_exit": ending.shown_exit}, exit_headers(early_exit)


def exit_headers(early_exit: str | None) -> Sequence[Header]:
    return () if early_exit is None else [(b"x-early-exit", early_exit.encode("latin-1"))]


async def body_of_values(values: Mapping[str, Any]) -> bytes:
    """The JSON of the values; the event loop runs in between if they are large."""
    return b"".join(await json_in_turns(values)) if is_large(values) else json_of(values)
