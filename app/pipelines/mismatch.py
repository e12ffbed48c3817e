"""Mismatches between a pipeline's declaration and its model, with the wrong key."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from app.core.model import TensorSpec
from app.core.text import nearest


class PipelineMismatch(Exception):
    """A pipeline's declaration does not match its model. ``location``: the path of the key below the pipeline."""

    def __init__(self, location: tuple[str | int, ...], text: str) -> None:
        super().__init__(text)
        self.location = location
        self.text = text


@contextmanager
def mismatch_at(*location: str | int) -> Iterator[None]:
    """Converts a ValueError of the block to a PipelineMismatch at ``location``."""
    try:
        yield
    except ValueError as exc:
        raise PipelineMismatch(location, str(exc)) from exc


def tensor_named(tensors: Iterable[TensorSpec], name: str, location: tuple[str | int, ...]) -> TensorSpec:
    """Raises PipelineMismatch."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if name not in by_name:
        raise PipelineMismatch(location, f"'{name}' is not a tensor of the model" + nearest(name, list(by_name)))
    return by_name[name]
