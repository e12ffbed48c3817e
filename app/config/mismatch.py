"""Mismatches between a pipeline's declaration and its model, with the wrong key."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from app.core.model import TensorSpec
from app.core.text import nearest

Found = TypeVar("Found")


class PipelineMismatch(Exception):
    """A pipeline's declaration does not match its model. ``location``: the path of the key below the pipeline.

    ``code``: of the linter's finding.
    """

    def __init__(self, location: tuple[str | int, ...], text: str, code: str = "gateway-yaml") -> None:
        super().__init__(text)
        self.location, self.text, self.code = location, text, code


@contextmanager
def mismatch_at(*location: str | int) -> Iterator[None]:
    """Converts a ValueError of the block to a PipelineMismatch at ``location``, below which its own ones are."""
    try:
        yield
    except PipelineMismatch as exc:
        exc.location = (*location, *exc.location)
        raise
    except ValueError as exc:
        raise PipelineMismatch(location, str(exc)) from exc


def named(name: str, known: Mapping[str, Found], what: str, *location: str | int) -> Found:
    """Returns what has this name. ``what``: ``an input of the pipeline``. Raises PipelineMismatch."""
    if name not in known:
        raise PipelineMismatch(location, f"'{name}' is not {what}{nearest(name, list(known))}")
    return known[name]


def tensor_named(tensors: Iterable[TensorSpec], name: str, location: tuple[str | int, ...]) -> TensorSpec:
    """Raises PipelineMismatch."""
    return named(name, {tensor.name: tensor for tensor in tensors}, "a tensor of the model", *location)
