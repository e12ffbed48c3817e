"""Shapes against declared dims, and the batch dimension that callers do not see."""

from app.domain.model import TensorSpec
from app.domain.tensor import Array


def shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(str(size) for size in shape) + "]"


def fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether a shape agrees with declared dims, where -1 is any size."""
    if shape == dims:
        return True
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110 - half the time of all()
        if dim not in (-1, size):
            return False
    return True


def without_batch(array: Array) -> Array:
    """Returns the item of a batch of one; any other array unchanged, so that the shape check can reject it."""
    return array[0] if array.shape[:1] == (1,) else array


def is_bare_item(tensor: TensorSpec) -> bool:
    """Whether an item is a bare value rather than a list, batch aside."""
    return tensor.dims in ((), (1,))
