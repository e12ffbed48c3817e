"""Contract checks for tensors from another step, called by the step that reads them.

Triton checks the shape of a step's input against ``dims``, where -1 allows any size. So it does not notice a step that
sends all tokens so far instead of the new ones. The gateway recognizes these messages, and answers
``contract_violation`` with the step that wrote the tensor (app/triton/grpc_errors.py).
"""

from collections.abc import Sequence

import numpy as np

from model_kit.outcomes import ContractBroken


def require_shape(name: str, tensor: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Returns the tensor if it has the required dims; -1 is any size.

    Raises:
        ContractBroken: Otherwise, with Triton's message for a wrong tensor between two steps.
    """
    if tensor.ndim == len(dims) and all(dim in (-1, size) for size, dim in zip(tensor.shape, dims, strict=True)):
        return tensor
    raise ContractBroken(
        f"unexpected shape for input '{name}' for model '{{model}}'. Expected {_text(dims)}, got {_text(tensor.shape)}."
    )


def require_at_most(name: str, tensor: np.ndarray, max_items: int) -> np.ndarray:
    """Returns the tensor if it has at most the allowed number of elements.

    Raises:
        ContractBroken: If it has more elements.
    """
    if tensor.size <= max_items:
        return tensor
    raise ContractBroken(
        f"too many items in input '{name}' for model '{{model}}'. "
        f"Expected at most {max_items}, got {_text(tensor.shape)}."
    )


def _text(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
