"""Converts the outputs of a pipeline to the caller's values, and checks the contract of each response's tensors.

``OutputField`` is compiled for one model signature; ``ContractCheck`` is made for one request.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from app.codecs.kinds import (
    as_datatype,
    bytes_of_numbers,
    declared_shape,
    fits,
    from_array_of,
    is_bare_item,
    is_one_content,
    shape_text,
)
from app.core.errors import ContractViolation
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, Array, InferenceResponse, Parameter, Tensor
from app.core.model import TensorSpec
from app.pipelines.spec import ContractSpec, OutputSpec


class OutputField:
    """One output of a pipeline, compiled for one model signature."""

    is_reasoning = False
    """Whether the value comes from the text of another output."""

    def __init__(self, name: str, spec: OutputSpec, tensor: TensorSpec, max_batch_size: int, *, has_rows: bool) -> None:
        """``has_rows``: a response has a row for each item of the request. Raises ValueError."""
        self.name, self.spec, self.tensor, self._has_rows = name, spec, tensor, has_rows
        self._is_content = is_one_content(spec.kind, tensor)
        """Whether the whole tensor is one text or file, and not each element."""
        is_item = self._is_content or is_bare_item(tensor)
        self.depth = has_rows + (0 if is_item else len(tensor.dims))
        """How many lists stand around an element of one response."""
        if self.depth and (spec.accumulates or spec.reaches or spec.none is not None or spec.join == "sum"):
            raise ValueError("has accumulates, none, reaches or join: sum, which only a single value can have")
        self.is_bare = self.depth == 0
        """Whether the caller is given one value rather than a list."""
        self.join = spec.join or ("concatenate" if spec.kind == "text" else "list")
        self.is_text_run = self.is_bare and spec.kind == "text" and self.join == "concatenate"
        """Whether each response carries the next piece of one text, whose characters may be split between pieces."""
        self.is_count = spec.reaches is not None
        """Whether the responses count, and the output tells at the end whether a limit was reached."""
        self._takes_batch = max_batch_size > 0 and not has_rows
        self._dims = ((1,) if self._takes_batch else (-1,) if has_rows else ()) + tensor.dims
        """The dimensions of Triton's tensor, including the batch dimension; -1 means any size."""
        self._is_list_of_items = self.depth == 1 and is_item
        """Whether each item of a batch is a bare value."""
        self._from_array = from_array_of(spec.kind, tensor.datatype, is_single=self.is_bare)
        self.empty_value: Any = None if self.is_bare else []
        self.empty_item: Any = None if self._is_list_of_items else []
        """The empty value of one item of a batch."""
        self.may_be_empty = spec.single or -1 in self._dims
        """Whether an array of the declared shape may have no elements."""

    def array_of(self, tensor: Tensor, items: int = 1) -> Array:
        """The array without its batch dimension. ``items``: of the request, if a response has a row for each.

        Triton checks no output, so many models write shapes and datatypes that differ a little from the declared ones.
        The array is as declared if its elements are: dimensions of size 1 may be missing or extra, and numbers may have
        another datatype if the declared one holds them. An empty array may have any shape and datatype.

        Raises ContractViolation if the elements are not the declared ones.
        """
        array, declared = tensor.array, self.tensor.datatype
        if not array.size and not (self._is_content and tensor.datatype == declared and fits(array.shape, self._dims)):
            return array
        if tensor.datatype != declared:
            converted = as_datatype(array, declared)
            if converted is None:
                name = DTYPE_BY_DATATYPE[declared].name
                dtype = _NUMPY.get(name, f"np.{name}")
                written = "STRING" if tensor.datatype == BYTES else tensor.datatype
                raise ContractViolation(
                    f"Output '{tensor.name}' is {tensor.datatype}; {declared} is declared.",
                    tensor=tensor.name,
                    hint=f"Convert the output in the model, in Python with `.astype({dtype})`, or declare "
                    f"`data_type: TYPE_{written}` in its config.pbtxt. The gateway converts numbers only if {declared} "
                    "holds each of them.",
                )
            array = converted
        if not fits(array.shape, self._dims):
            shape = declared_shape(array.shape, (items, *self.tensor.dims) if self._has_rows else self._dims)
            if shape is None:
                raise self.other_shape(array.shape)
            array = array.reshape(shape)
        array = array[0] if self._takes_batch else array
        return bytes_of_numbers(array, len(self.tensor.dims)) if self._is_content else array

    def other_shape(self, shape: tuple[int, ...]) -> ContractViolation:
        """The violation of a model that wrote this shape."""
        name, dims = self.tensor.name, shape_text(self._dims)
        if 0 in shape:
            hint = f"If the model may write none, declare an early_exit rule with empty: [{name}] in gateway.yaml."
        elif self._takes_batch and shape and declared_shape(shape, (shape[0], *self._dims[1:])):
            hint = f"The model wrote {shape[0]} rows for one item. With batch: true the answer has all rows."
        else:
            hint = (
                f"Write {dims} in the model, or correct `dims` of '{name}' in its config.pbtxt. Dimensions of size 1 "
                "may be missing or extra, if it is clear which."
            )
        return ContractViolation(
            f"Output '{name}' has shape {shape_text(shape)}; {dims} is declared.", tensor=name, hint=hint
        )

    def value_of(self, array: Array) -> Any:
        """Returns the value of a non-empty array. Raises ContractViolation if the bytes are not valid JSON."""
        try:
            value = self._from_array(array.reshape(-1) if self._is_list_of_items else array)
        except ValueError as exc:
            raise ContractViolation(f"Output '{self.tensor.name}' is not JSON.", tensor=self.tensor.name) from exc
        return None if self.spec.none is not None and value == self.spec.none else value


_NUMPY = {"bool": "np.bool_", "object": "np.object_", "bfloat16": "ml_dtypes.bfloat16"}
"""How Python names the types whose numpy name is not that of an attribute."""


class TextDifferences:
    """Turns texts that each repeat everything so far into pieces.

    U+FFFD at the end of a text is the beginning of a character, which the next text has whole.
    """

    def __init__(self, tensor: str) -> None:
        self._tensor = tensor
        self._text = ""
        self._rest = ""

    def decode(self, raw: bytes, final: bool = False) -> str:
        """Raises ContractViolation for a text that does not repeat the text so far."""
        if final and not raw:
            rest, self._rest = self._rest, ""
            return rest
        text = raw.decode("utf-8", "replace")
        if not text.startswith(self._text):
            raise ContractViolation(
                f"Output '{self._tensor}' does not begin with the text so far.",
                tensor=self._tensor,
                hint="With accumulates: true, each response must repeat the text so far. "
                "Remove accumulates if the model sends only new text.",
            )
        complete = text.rstrip("\ufffd")
        piece, self._text, self._rest = complete[len(self._text) :], complete, text[len(complete) :]
        return piece


class ContractCheck:
    """Checks the contracts of one request, by tensor name, over all its responses.

    A common fault of language-model ensembles is a step that sends all tokens so far instead of the newest token. Its
    tensor grows with each response, and Triton accepts this if the next step accepts any size.
    """

    def __init__(
        self,
        contracts: Mapping[str, ContractSpec],
        parameters: Mapping[str, Parameter] = MappingProxyType({}),
        *,
        takes_batch: bool = False,
    ) -> None:
        """``takes_batch``: the tensors have a batch dimension of 1, which the shapes of contracts leave out."""
        self._contracts = contracts
        self._parameters = parameters
        self._takes_batch = takes_batch
        self._first_size: dict[str, int] = {}

    def check(self, response: InferenceResponse) -> None:
        """Raises ContractViolation."""
        for name, contract in self._contracts.items():
            tensor = response.outputs.get(name)
            if tensor is None:
                continue
            size, most, wrong, is_growth = tensor.array.size, contract.max_items, "", True
            limit = self._parameters.get(most) if isinstance(most, str) else most
            first = self._first_size.setdefault(name, size) if contract.not_growing else size
            agreed = (*((1,) if self._takes_batch else ()), *(contract.shape or ()))
            if limit is not None and size > int(limit):
                wrong = f"the contract allows at most {limit} items"
            elif contract.shape is not None and declared_shape(tensor.shape, agreed) is None:
                words = " with the batch dimension" if self._takes_batch else ""
                wrong, is_growth = f"the contract requires {shape_text(agreed)}{words}", False
            elif size > first:
                wrong = f"the first response had {first} items, and no later response may have more"
            if wrong:
                grows = f"A step sends all items of '{name}' with each response. It must send only items that are new."
                raise ContractViolation(
                    f"Output '{name}' has shape {shape_text(tensor.shape)}; {wrong}.",
                    tensor=name,
                    hint=grows if is_growth else None,
                )
