"""The parameters of a request, compiled for one model signature.

A parameter becomes a parameter of Triton's request, a tensor, or a member of a JSON object in a text tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from app.codecs.kinds import ToArray, converted, encoded_json, shape_text, to_array_of
from app.codecs.numbers import Bounds, float_type, integer_type
from app.core.inference import BYTES, FLOAT_DATATYPES, INTEGER_DATATYPES, Array, Tensor
from app.core.model import TensorSpec
from app.pipelines.spec import ADAPTER, ParameterSpec

MAX_ITEMS = 1024
"""Limit of the elements of a list."""
MAX_TEXT_CHARACTERS = 65_536
"""Limit of a text in a list."""
MAX_TOKENS = 131_072
"""Limit of the token ids in place of a text."""

_DATATYPES_BY_TYPE = {
    "integer": INTEGER_DATATYPES,
    "number": FLOAT_DATATYPES,
    "boolean": frozenset({"BOOL"}),
    "string": frozenset({BYTES}),
    "strings": frozenset({BYTES}),
    "integers": INTEGER_DATATYPES,
    "object": frozenset({BYTES}),
}
"""The datatypes of a tensor of its own."""
_LISTS = frozenset({"strings", "integers"})
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class ParameterField:
    """``tensor``: the input that has the value alone. ``json_tensor``: the text input whose JSON object has it."""

    name: str
    spec: ParameterSpec
    tensor: TensorSpec | None
    json_tensor: TensorSpec | None
    json_type: Any
    place: tuple[str, str]
    """The value's place in the JSON object: the nested object that has it, or an empty name, and its name there."""
    _has_batch: bool
    _to_array: ToArray | None
    """None for a parameter that is not a tensor of its own."""

    @classmethod
    def compile(
        cls,
        name: str,
        spec: ParameterSpec,
        tensor: TensorSpec | None = None,
        json_tensor: TensorSpec | None = None,
        max_batch_size: int = 0,
    ) -> "ParameterField":
        """Raises ValueError if the bounds, the enum, the default or the tensor do not match."""
        if tensor is not None:
            is_list = spec.type in _LISTS
            if tensor.datatype not in _DATATYPES_BY_TYPE[spec.type]:
                raise ValueError(f"is of type {spec.type}, which does not fit {tensor.datatype}")
            if len(tensor.dims) != 1 if is_list else any(dim not in (-1, 1) for dim in tensor.dims):
                what = "a list" if is_list else "one value"
                raise ValueError(f"is {what}, which does not fit the dimensions {shape_text(tensor.dims)}")
        if json_tensor is not None and (json_tensor.datatype != BYTES or json_tensor.dims not in ((1,), (-1,), ())):
            text = f"{json_tensor.datatype} {shape_text(json_tensor.dims)}"
            raise ValueError(f"is a member of '{json_tensor.name}', which is {text} and not a single text")
        to_array = None if tensor is None else _to_array_of(spec, tensor)
        outer, _, member = (spec.member or name).removesuffix("[]").rpartition(".")
        place, has_batch = (outer, member), max_batch_size > 0
        field = cls(name, spec, tensor, json_tensor, _json_type(spec, tensor), place, has_batch, to_array)
        for key, value in (("default", spec.default), ("value", spec.send)):
            if value is not None:
                field.converted(value, key)
        return field

    @property
    def is_required(self) -> bool:
        return self.spec.is_required

    def converted(self, value: Any, name: str = "value") -> Any:
        """Checks a value of the configuration like a caller's, and returns it. Raises ValueError."""
        return self.checked(converted(value, self.json_type, name))

    def checked(self, value: Any) -> Any:
        """Checks a decoded value and returns the value to send. Raises ValueError."""
        if self.spec.type in _LISTS:
            return value if isinstance(value, list) else [value]
        if self.spec.type != "number":
            return value
        number = float(value)
        if not math.isfinite(number):
            raise ValueError("must be a finite number")
        if self.spec.enum is not None and number not in self.spec.enum:
            raise ValueError("is not one of the allowed values")
        return number

    def tensor_of(self, value: Any, items: int) -> Tensor:
        """The tensor of a checked value, repeated for each item of a batch. Raises ValueError."""
        assert self.tensor is not None
        assert self._to_array is not None
        array = self._to_array(value)
        if self.spec.type not in _LISTS:
            array = array.reshape(self.tensor.dims)
        return repeated(self.tensor, array, items if self._has_batch else None)

    def put(self, value: Any, members: dict[str, Any]) -> None:
        """Writes a checked value into the JSON object. Raises ValueError."""
        outer, name = self.place
        if self.spec.as_text:
            value = encoded_json(value).decode()
        around = members.setdefault(outer, {}) if outer else members
        around[name] = [value] if (self.spec.member or "").endswith("[]") else value


def adapter_field(names: Sequence[str]) -> ParameterField:
    """The field that names an adapter. It is not sent: it sets hidden parameters."""
    spec = ParameterSpec(type="string", enum=list(names), optional=True, description="The adapter of the model.")
    return ParameterField.compile(ADAPTER, spec)


def repeated(tensor: TensorSpec, array: Array, items: int | None) -> Tensor:
    """``items``: of a batch; None for a model without batches."""
    return Tensor(tensor.name, tensor.datatype, array if items is None else np.repeat(array[np.newaxis], items, axis=0))


def _to_array_of(spec: ParameterSpec, tensor: TensorSpec) -> ToArray:
    if spec.type == "object":
        to_array = to_array_of("json", tensor.datatype)
        return lambda value: to_array(encoded_json(value))
    return to_array_of("text" if spec.type in ("string", "strings") else "number", tensor.datatype)


def _json_type(spec: ParameterSpec, tensor: TensorSpec | None) -> Any:
    """``tensor``: the input for the parameter, if it is a tensor. Raises ValueError."""
    bounds = Bounds(spec.minimum, spec.maximum, spec.enum)
    datatype = "INT64" if tensor is None else tensor.datatype
    if spec.type == "integer":
        return integer_type(datatype, bounds)
    if spec.type == "number":
        return float_type(bounds)
    if spec.type == "integers":
        return _list_of(integer_type(datatype, bounds), tensor)
    if spec.type == "strings":
        text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
        return text | _list_of(text, tensor)
    if spec.type in ("object", "text_or_tokens"):
        return dict[str, Any] if spec.type == "object" else str | TokenIds
    return Literal[tuple(spec.enum)] if spec.enum else bool if spec.type == "boolean" else str


def _list_of(element: Any, tensor: TensorSpec | None) -> Any:
    size = -1 if tensor is None else tensor.dims[0]
    return Annotated[list[element], Meta(min_length=max(size, 1), max_length=MAX_ITEMS if size == -1 else size)]
