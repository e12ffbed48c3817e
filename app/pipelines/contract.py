"""Checks the contract for the tensors of each response.

A common fault of language-model ensembles is a step that sends all tokens so far instead of the newest token. Its
tensor grows with each response, and Triton accepts this if the next step accepts any size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.domain.errors import ContractViolation
from app.domain.inference import InferenceResponse, Parameter
from app.domain.tensor import Tensor
from app.pipelines.shapes import fits, shape_text
from app.pipelines.spec import ContractSpec


@dataclass(frozen=True, slots=True)
class TensorContract:
    tensor: str
    max_items: int | None = None
    """The maximum number of elements."""
    shape: tuple[int, ...] | None = None
    """-1 is any size. If ``takes_batch``, the batch dimension of 1 is not included."""
    not_growing: bool = False
    takes_batch: bool = False


class Contracts:
    """The contracts of a pipeline, by tensor name."""

    def __init__(self, given: Mapping[str, ContractSpec], *, takes_batch: bool) -> None:
        self._contracts = {
            name: TensorContract(
                tensor=name,
                max_items=spec.max_items if isinstance(spec.max_items, int) else None,
                shape=None if spec.shape is None else tuple(spec.shape),
                not_growing=spec.not_growing,
                takes_batch=takes_batch,
            )
            for name, spec in given.items()
        }
        self._limits = {name: spec.max_items for name, spec in given.items() if isinstance(spec.max_items, str)}
        """Tensor -> the parameter whose value is the maximum number of elements."""

    def of(self, parameters: Mapping[str, Parameter]) -> Mapping[str, TensorContract]:
        """Returns the contracts of a request with these parameters."""
        if not self._limits:
            return self._contracts
        limits = {name: parameters[limit] for name, limit in self._limits.items() if limit in parameters}
        agreed = {name: replace(self._contracts[name], max_items=int(limit)) for name, limit in limits.items()}
        return {**self._contracts, **agreed}


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
        size = tensor.array.size
        if contract.max_items is not None and size > contract.max_items:
            raise _violation(tensor, f"the contract allows at most {contract.max_items} items", hint=_grows(tensor))
        if contract.shape is not None:
            _check_shape(tensor, contract.shape, takes_batch=contract.takes_batch)
        first = self._first_size.setdefault(tensor.name, size) if contract.not_growing else size
        if size > first:
            agreed = f"the first response had {first} items, and no later response may have more"
            raise _violation(tensor, agreed, hint=_grows(tensor))


def _check_shape(tensor: Tensor, shape: tuple[int, ...], *, takes_batch: bool) -> None:
    agreed = (1, *shape) if takes_batch else shape
    if not fits(tensor.shape, agreed):
        words = " with the batch dimension" if takes_batch else ""
        raise _violation(tensor, f"the contract requires {shape_text(agreed)}{words}")


def _violation(tensor: Tensor, agreed: str, hint: str | None = None) -> ContractViolation:
    return ContractViolation(
        f"Output '{tensor.name}' has shape {shape_text(tensor.shape)}; {agreed}.", tensor=tensor.name, hint=hint
    )


def _grows(tensor: Tensor) -> str:
    return f"A step sends all items of '{tensor.name}' with each response. It must send only items that are new."
