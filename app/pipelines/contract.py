"""What must hold of the tensors of each response: found at the first response that breaks it.

The growing-token fault of language-model ensembles (a step that passes on all tokens so far, not the newest) shows as a
tensor that grows from response to response; nothing in Triton objects where the next step takes any size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.domain.errors import ContractViolation
from app.domain.inference import InferenceResponse
from app.domain.tensor import Tensor
from app.pipelines.shapes import fits, shape_text, without_batch


@dataclass(frozen=True, slots=True)
class TensorContract:
    tensor: str
    max_items: int | None = None
    """Never more elements than this."""
    shape: tuple[int, ...] | None = None
    """Without the batch dimension, if ``takes_batch``; -1 is any size."""
    not_growing: bool = False
    takes_batch: bool = False


class ContractCheck:
    """The contracts of one request, over all its responses."""

    def __init__(self, contracts: Mapping[str, TensorContract]) -> None:
        self._contracts = contracts
        self._first_size: dict[str, int] = {}

    def check(self, response: InferenceResponse) -> None:
        """Raises ContractViolation."""
        for name, contract in self._contracts.items():
            tensor = response.outputs.get(name)
            if tensor is not None:
                self._check(tensor, contract)

    def _check(self, tensor: Tensor, contract: TensorContract) -> None:
        size, shape = tensor.array.size, tensor.shape
        if contract.max_items is not None and size > contract.max_items:
            raise _violation(tensor, f"at most {contract.max_items} items were agreed")
        if contract.takes_batch:
            shape = without_batch(tensor.array).shape
        if contract.shape is not None and not fits(shape, contract.shape):
            raise _violation(tensor, f"{shape_text(contract.shape)} was agreed")
        if contract.not_growing and size > self._first_size.setdefault(tensor.name, size):
            raise _violation(
                tensor, f"the first response had {self._first_size[tensor.name]} items and none may have more"
            )


def _violation(tensor: Tensor, agreed: str) -> ContractViolation:
    return ContractViolation(
        f"Output '{tensor.name}' has shape {shape_text(tensor.shape)}; {agreed}.",
        tensor=tensor.name,
        hint=f"A step passes on all of '{tensor.name}' so far: let it send only what is new since its last response.",
    )
