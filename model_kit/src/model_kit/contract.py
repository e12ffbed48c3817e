"""What was agreed of a tensor that comes from another step: checked by the step that reads it.

Triton checks the shape of a step's input against ``dims``, where -1 takes any size; a step that passes on all tokens so
far in place of the newest then goes unseen. The gateway knows these texts, and answers ``contract_violation`` with the
step that wrote the tensor (app/triton/faults.py).
"""

from collections.abc import Sequence

import numpy as np

from model_kit.outcomes import ContractBroken


def require_shape(name: str, tensor: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """The tensor, if it has the agreed dims; -1 is any size.

    Raises:
        ContractBroken: in the words in which Triton itself refuses a tensor between two steps.
    """
    if tensor.ndim == len(dims) and all(dim in (-1, size) for size, dim in zip(tensor.shape, dims, strict=True)):
        return tensor
    raise ContractBroken(
        f"unexpected shape for input '{name}' for model '{{model}}'. Expected {_text(dims)}, got {_text(tensor.shape)}."
    )


def require_at_most(name: str, tensor: np.ndarray, max_items: int) -> np.ndarray:
    """The tensor, if it has no more elements than were agreed.

    Raises:
        ContractBroken: it has more.
    """
    if tensor.size <= max_items:
        return tensor
    raise ContractBroken(
        f"too many items in input '{name}' for model '{{model}}'. "
        f"Expected at most {max_items}, got {_text(tensor.shape)}."
    )


def _text(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
