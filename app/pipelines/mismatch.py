"""A pipeline's words that do not fit its model, with the key that is wrong."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from app.domain.model import TensorSpec
from app.domain.nearest import nearest


class PipelineMismatch(Exception):
    """A pipeline's words do not fit its model. ``location`` is the path of the key below the pipeline."""

    def __init__(self, location: tuple[str | int, ...], text: str) -> None:
        super().__init__(text)
        self.location = location
        self.text = text


@contextmanager
def mismatch_at(*location: str | int) -> Iterator[None]:
    """A ValueError inside is about the key at ``location``."""
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
