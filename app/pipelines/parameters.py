"""The parameters of a request, compiled for one model signature.

A parameter becomes a parameter of Triton's request, a tensor, or a member of a JSON object in a text tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
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
class MemberPath:
    """The place of a value in a JSON object: in the nested object ``outer``, if it is not empty."""

    outer: str
    name: str
    in_list: bool
    """Whether the member is a list with only the value."""

    @classmethod
    def parsed(cls, text: str) -> "MemberPath":
        """``text``: as in ``member`` of :class:`app.pipelines.spec.ParameterSpec`."""
        outer, _, name = text.removesuffix("[]").rpartition(".")
        return cls(outer, name, text.endswith("[]"))

    def put(self, value: Any, members: dict[str, Any]) -> None:
        around = members.setdefault(self.outer, {}) if self.outer else members
        around[self.name] = [value] if self.in_list else value

    def value_in(self, members: Mapping[str, Any]) -> Any:
        """Returns None for an object without the value."""
        around = members.get(self.outer, {}) if self.outer else members
        value = around.get(self.name)
        return value[0] if self.in_list and value else value


@dataclass(frozen=True, slots=True)
class ParameterField:
    """``tensor``: the input that has the value alone. ``json_tensor``: the text input whose JSON object has it."""

    name: str
    spec: ParameterSpec
    tensor: TensorSpec | None
    json_tensor: TensorSpec | None
    json_type: Any
    member: MemberPath
    """The place of the value in the JSON object."""
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
            _check_tensor(spec, tensor)
        if json_tensor is not None and (json_tensor.datatype != BYTES or json_tensor.dims not in ((1,), (-1,), ())):
            text = f"{json_tensor.datatype} {shape_text(json_tensor.dims)}"
            raise ValueError(f"is a member of '{json_tensor.name}', which is {text} and not a single text")
        to_array = None if tensor is None else _to_array_of(spec, tensor)
        member = MemberPath.parsed(spec.member or name)
        field = cls(name, spec, tensor, json_tensor, _json_type(spec, tensor), member, max_batch_size > 0, to_array)
        for key, value in (("default", spec.default), ("value", spec.send)):
            if value is not None:
                field.converted(value, key)
        return field

    @property
    def is_required(self) -> bool:
        return self.spec.is_required

    @property
    def is_settable(self) -> bool:
        """Whether a caller may set it."""
        return self.spec.is_settable

    @property
    def is_request_parameter(self) -> bool:
        return self.tensor is None and self.json_tensor is None

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

    def value_in(self, arrays: Mapping[str, Array]) -> Any:
        """Returns the value that a request has, from its input tensors by name; None for none."""
        tensor = self.tensor or self.json_tensor
        array = None if tensor is None else arrays.get(tensor.name)
        if array is None or not array.size:
            return None
        first = array.reshape(-1)[0]
        return first if self.json_tensor is None else self.member.value_in(msgspec.json.decode(first))

    def read(self, value: Any, batch_size: int) -> Tensor:
        """Returns the tensor, repeated for each item of a batch. Raises ValueError."""
        assert self.tensor is not None
        assert self._to_array is not None
        array = self._to_array(self.checked(value))
        if self.spec.type not in _LISTS:
            array = array.reshape(self.tensor.dims)
        return _repeated(self.tensor, array, batch_size, has_batch=self._has_batch)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The parameters that are members of the JSON object in one text tensor. The tensor is always sent."""

    tensor: TensorSpec
    fields: tuple[ParameterField, ...]
    has_batch: bool

    def read(self, values: Mapping[str, Any], batch_size: int) -> Tensor:
        """``values``: checked values by field name."""
        members: dict[str, Any] = {}
        for field in self.fields:
            value = values.get(field.name)
            if value is not None:
                field.member.put(encoded_json(value).decode() if field.spec.as_text else value, members)
        array = np.empty((1,), np.object_)
        array[0] = encoded_json(members)
        return _repeated(self.tensor, array, batch_size, has_batch=self.has_batch)


def json_objects(fields: Sequence[ParameterField], *, has_batch: bool) -> tuple[JsonObject, ...]:
    """Returns the JSON objects of these parameters, one for each tensor."""
    tensors = {field.json_tensor.name: field.json_tensor for field in fields if field.json_tensor is not None}
    return tuple(
        JsonObject(tensor, tuple(field for field in fields if field.json_tensor == tensor), has_batch)
        for tensor in tensors.values()
    )


def adapter_field(names: Sequence[str]) -> ParameterField:
    """The field that names an adapter. It is not sent: it sets hidden parameters."""
    spec = ParameterSpec(type="string", enum=list(names), optional=True, description="The adapter of the model.")
    return ParameterField.compile(ADAPTER, spec)


def _repeated(tensor: TensorSpec, array: Any, batch_size: int, *, has_batch: bool) -> Tensor:
    if has_batch:
        array = np.repeat(array[np.newaxis], batch_size, axis=0)
    return Tensor(tensor.name, tensor.datatype, array)


def _check_tensor(spec: ParameterSpec, tensor: TensorSpec) -> None:
    if tensor.datatype not in _DATATYPES_BY_TYPE[spec.type]:
        raise ValueError(f"is of type {spec.type}, which does not fit {tensor.datatype}")
    if spec.type in _LISTS:
        if len(tensor.dims) != 1:
            raise ValueError(f"is a list, which does not fit the dimensions {shape_text(tensor.dims)}")
    elif any(dim not in (-1, 1) for dim in tensor.dims):
        raise ValueError(f"is one value, which does not fit the dimensions {shape_text(tensor.dims)}")


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
