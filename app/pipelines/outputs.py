"""One output of a pipeline, compiled for one model signature."""

from dataclasses import dataclass
from typing import Any

from app.domain.errors import ContractViolation
from app.domain.model import TensorSpec
from app.domain.tensor import Array, Tensor
from app.pipelines.kinds import FromArray, from_array_of, from_one_element_of
from app.pipelines.shapes import fits, is_bare_item, shape_text, without_batch
from app.pipelines.spec import OutputSpec


@dataclass(frozen=True, slots=True)
class OutputField:
    name: str
    spec: OutputSpec
    tensor: TensorSpec
    takes_batch: bool
    depth: int
    """How many lists stand around an element of one response."""
    is_bare: bool
    """Whether the caller is given one value rather than a list."""
    join: str
    is_text_run: bool
    """Whether each response carries the next piece of one text, whose characters may be split between pieces."""
    _dims: tuple[int, ...]
    """The dimensions of Triton's tensor, including the batch dimension; -1 means any size."""
    _is_list_of_items: bool
    """Whether each item of a batch is a bare value."""
    _from_array: FromArray

    @classmethod
    def compile(
        cls, name: str, spec: OutputSpec, tensor: TensorSpec, *, max_batch_size: int, batch: bool
    ) -> "OutputField":
        takes_batch = max_batch_size > 0 and not batch
        depth = batch + (0 if is_bare_item(tensor) else len(tensor.dims))
        join = spec.join or ("concatenate" if spec.kind == "text" else "list")
        return cls(
            name=name,
            spec=spec,
            tensor=tensor,
            takes_batch=takes_batch,
            depth=depth,
            is_bare=depth == 0,
            join=join,
            is_text_run=depth == 0 and spec.kind == "text" and join == "concatenate",
            _dims=((1,) if takes_batch else (-1,) if batch else ()) + tensor.dims,
            _is_list_of_items=depth == 1 and is_bare_item(tensor),
            _from_array=from_array_of(spec.kind, tensor.datatype) if depth else from_one_element_of(spec.kind),
        )

    @property
    def empty_value(self) -> Any:
        return None if self.is_bare else []

    def array_of(self, tensor: Tensor) -> Array:
        """The array without its batch dimension. Raises ContractViolation where it is not what is declared."""
        if tensor.datatype != self.tensor.datatype:
            raise ContractViolation(
                f"Output '{tensor.name}' is {tensor.datatype}; {self.tensor.datatype} is declared.", tensor=tensor.name
            )
        array = tensor.array
        if array.size and not fits(array.shape, self._dims):
            if array.ndim or self._dims != (1,):
                raise self._other_shape(array.shape)
            array = array.reshape(1)  # some backends send a scalar for the dims [1]
        return without_batch(array) if self.takes_batch else array

    def _other_shape(self, shape: tuple[int, ...]) -> ContractViolation:
        hint = None
        if shape and self.takes_batch and fits(shape[1:], self._dims[1:]):
            hint = f"The model wrote {shape[0]} rows for one item. With batch: true the answer has all rows."
        return ContractViolation(
            f"Output '{self.tensor.name}' has shape {shape_text(shape)}; {shape_text(self._dims)} is declared.",
            tensor=self.tensor.name,
            hint=hint,
        )

    def value_of(self, array: Array) -> Any:
        """Returns the value of a non-empty array. Raises ContractViolation if the bytes are not valid JSON."""
        try:
            return self._from_array(array.reshape(-1) if self._is_list_of_items else array)
        except ValueError as exc:
            raise ContractViolation(f"Output '{self.tensor.name}' is not JSON.", tensor=self.tensor.name) from exc
