"""The table of `docs/reference/models.md`: `python -m tests.zoo.page` prints it."""

import sys
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.zoo.cases import random_case
from tests.zoo.dialects import dialects_of
from tests.zoo.kinds import KINDS, Kind

HEAD = ("model", "`gateway.yaml`, besides `model`", "addresses")
USUAL = {"generate": "no generate", "oip_json": "no JSON under `/v2`"}
ALSO = {"raw_body": "a raw body", "completion": "OpenAI completions", "embeddings": "OpenAI embeddings"}
ONLY_TESTED = frozenset(
    {
        *("other_rows", "silent", "single", "gaps", "blobs", "types", "cube_batched", "forgetful", "cached"),
        *("priorities", "iterative", "incomplete"),
    }
)
"""Kinds that are not deployed. They are not on the page."""


def table() -> str:
    names: dict[tuple[str, ...], list[str]] = {}
    for kind in KINDS:
        if not kind.fault and kind.name not in ONLY_TESTED:
            name, *rest = _row(kind)
            names.setdefault(tuple(rest), []).append(name)
    rows = (("; ".join(alike), *rest) for rest, alike in names.items())
    head, *lines = [f"| {' | '.join(row)} |\n" for row in (HEAD, *rows)]
    return "".join([head, "|---" * len(HEAD) + "|\n", *lines])


def _row(kind: Kind) -> tuple[str, ...]:
    called = {dialect.__name__ for dialect in dialects_of(random_case(kind, Random(1), rows=1), heavy=True)}
    return (
        f"`{kind.name}`" + (", decoupled" if kind.is_decoupled else "") + (", ensemble" if kind.steps else ""),
        "<br>".join(_declared(kind)) or "nothing",
        ", ".join(
            text for names in (USUAL, ALSO) for name, text in names.items() if (name in called) == (names is ALSO)
        ),
    )


def _declared(kind: Kind) -> Iterator[str]:
    if kind.batch:
        yield "`batch: true`"
    for name in (*kind.inputs, *kind.outputs):
        keys = [f"kind: {kind.kinds[name]}"] if name in kind.kinds else []
        keys += ["single: true"] if name in kind.single else []
        if keys:
            yield f"`{name}: {{{', '.join(keys)}}}`"
    yield from (f"`{key}: {_flow(value)}`" for key, value in kind.pipeline.items())


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(_flow, value)) + "]" if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.stdout.write(table())
