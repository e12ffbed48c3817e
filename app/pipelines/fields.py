"""The fields of a pipeline: what a caller may send or is given under one name, compiled for one model signature."""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from app.domain.errors import ContractViolation
from app.domain.model import TensorSpec
from app.domain.tensor import DTYPE_BY_DATATYPE, INTEGER_DATATYPES, Array, Tensor
from app.pipelines.kinds import FromArray, ToArray, bytes_of_base64, from_array_of, to_array_of
from app.pipelines.spec import InputSpec, OutputSpec, ParameterSpec

_INT64 = np.iinfo(np.int64)


def shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(str(size) for size in shape) + "]"


def fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Whether a shape agrees with declared dims, where -1 is any size."""
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


@dataclass(frozen=True, slots=True)
class InputField:
    """``json_type`` is the type that msgspec decodes and describes; ``read`` may raise ValueError."""

    name: str
    spec: InputSpec
    tensor: TensorSpec
    json_type: Any
    is_bare: bool
    batched: bool
    adds_batch: bool
    _to_array: ToArray

    @classmethod
    def compile(
        cls, name: str, spec: InputSpec, tensor: TensorSpec, *, max_batch_size: int, batch: bool
    ) -> "InputField":
        is_bare = tensor.dims in ((), (1,)) and not batch
        return cls(
            name=name,
            spec=spec,
            tensor=tensor,
            json_type=_json_type(spec, tensor, is_bare=is_bare, depth=len(tensor.dims) + batch),
            is_bare=is_bare,
            batched=batch,
            adds_batch=max_batch_size > 0 and not batch,
            _to_array=to_array_of(spec.kind, tensor.datatype),
        )

    @property
    def is_file(self) -> bool:
        return self.spec.kind in {"image", "binary"}

    @property
    def is_required(self) -> bool:
        return not self.spec.optional and self.spec.default is None

    def read(self, value: Any) -> Tensor:
        """A decoded value -> the tensor that Triton is sent."""
        array = self._reshaped(self._to_array(self._unwrapped(value)))
        self._check_enum(array)
        if self.adds_batch:
            array = array[np.newaxis]
        return Tensor(self.tensor.name, self.tensor.datatype, array)

    def _unwrapped(self, value: Any) -> Any:
        if self.spec.kind == "json":
            return bytes(value)
        return _content_of(value) if self.is_file else value

    def _reshaped(self, array: Array) -> Array:
        dims = ((-1,) if self.batched else ()) + self.tensor.dims
        if self.is_bare and array.size == 1:
            return array.reshape(self.tensor.dims)
        if array.size == 0 and array.ndim < len(dims):
            array = array.reshape(array.shape + tuple(max(dim, 0) for dim in dims[array.ndim :]))
        if not fits(array.shape, dims):
            raise ValueError(f"has shape {shape_text(array.shape)}; expected {shape_text(dims)}")
        return array

    def _check_enum(self, array: Array) -> None:
        if self.spec.enum is not None and self.spec.kind == "number" and not np.isin(array, self.spec.enum).all():
            raise ValueError("is not one of the allowed values")


@dataclass(frozen=True, slots=True)
class ParameterField:
    name: str
    spec: ParameterSpec
    tensor: TensorSpec | None
    json_type: Any
    adds_batch: bool

    @classmethod
    def compile(
        cls, name: str, spec: ParameterSpec, tensor: TensorSpec | None, *, max_batch_size: int
    ) -> "ParameterField":
        return cls(name, spec, tensor, _parameter_type(spec), max_batch_size > 0)

    @property
    def is_required(self) -> bool:
        return not self.spec.optional and self.spec.default is None

    def read(self, value: Any) -> Tensor:
        """The value as a tensor of one element, for a parameter that is one. Raises ValueError."""
        assert self.tensor is not None
        array = to_array_of("text" if isinstance(value, str) else "number", self.tensor.datatype)(value)
        array = array.reshape(self.tensor.dims)
        return Tensor(self.tensor.name, self.tensor.datatype, array[np.newaxis] if self.adds_batch else array)


@dataclass(frozen=True, slots=True)
class OutputField:
    name: str
    spec: OutputSpec
    tensor: TensorSpec
    is_bare: bool
    takes_batch: bool
    batched: bool
    _from_array: FromArray

    @classmethod
    def compile(
        cls, name: str, spec: OutputSpec, tensor: TensorSpec, *, max_batch_size: int, batch: bool
    ) -> "OutputField":
        return cls(
            name=name,
            spec=spec,
            tensor=tensor,
            is_bare=tensor.dims in ((), (1,)) and not batch,
            takes_batch=max_batch_size > 0 and not batch,
            batched=batch,
            _from_array=from_array_of(spec.kind, tensor.datatype),
        )

    @property
    def join(self) -> str:
        return self.spec.join or ("concatenate" if self.spec.kind == "text" else "list")

    @property
    def is_text_run(self) -> bool:
        """Whether each response carries the next piece of one text, whose characters may be split between pieces."""
        return self.is_bare and self.spec.kind == "text" and self.join == "concatenate"

    @property
    def empty_value(self) -> Any:
        return None if self.is_bare else []

    def array_of(self, tensor: Tensor) -> Array:
        """The array without its batch dimension. Raises ContractViolation where it is not what is declared."""
        if tensor.datatype != self.tensor.datatype:
            raise ContractViolation(
                f"Output '{tensor.name}' is {tensor.datatype}; {self.tensor.datatype} is declared.", tensor=tensor.name
            )
        array = tensor.array[0] if self.takes_batch and len(tensor.array) == 1 else tensor.array
        dims = ((-1,) if self.batched else ()) + self.tensor.dims
        if not fits(array.shape, dims) and array.size:
            raise ContractViolation(
                f"Output '{tensor.name}' has shape {shape_text(array.shape)}; {shape_text(dims)} is declared.",
                tensor=tensor.name,
            )
        return array

    def value_of(self, array: Array) -> Any:
        """What the caller is given. Raises ContractViolation where ``kind: json`` is not JSON."""
        if self.is_bare:
            array = array.reshape(-1)
            if not array.size:
                return self.empty_value
        try:
            value = self._from_array(array)
        except ValueError as exc:
            raise ContractViolation(f"Output '{self.tensor.name}' is not JSON.", tensor=self.tensor.name) from exc
        return _bare(value[0]) if self.is_bare else value


def _bare(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _content_of(value: Any) -> Any:
    """The bytes of a file, which come as they are from a form and as base64 from JSON; lists keep their nesting."""
    if isinstance(value, list):
        return [_content_of(item) for item in value]
    return bytes_of_base64(value) if isinstance(value, str) else value


def _json_type(spec: InputSpec, tensor: TensorSpec, *, is_bare: bool, depth: int) -> Any:
    if spec.kind == "json":
        return msgspec.Raw
    element = _element_type(spec, tensor.datatype)
    if is_bare:
        return element | Annotated[_list_of(element), Meta(min_length=1, max_length=1)]
    return functools.reduce(lambda inner, _: _list_of(inner), range(depth), element)


def _list_of(element: Any) -> Any:
    return list[element]


def _element_type(spec: InputSpec, datatype: str) -> Any:
    if spec.kind == "number":
        return _number_type(spec, datatype)
    if spec.kind == "text":
        return Literal[tuple(spec.enum)] if spec.enum else str
    schema = {"contentEncoding": "base64", "contentMediaType": "image/*" if spec.kind == "image" else "*/*"}
    return Annotated[str, Meta(extra_json_schema=schema)]


def _number_type(spec: InputSpec, datatype: str) -> Any:
    if datatype == "BOOL":
        return bool
    if datatype not in INTEGER_DATATYPES:
        return _bounded(float, spec.minimum, spec.maximum)
    limits = np.iinfo(DTYPE_BY_DATATYPE[datatype])
    low = max(int(limits.min), int(spec.minimum)) if spec.minimum is not None else int(limits.min)
    high = min(int(limits.max), int(spec.maximum)) if spec.maximum is not None else int(limits.max)
    return _bounded(int, low, high if high <= _INT64.max else None)


def _parameter_type(spec: ParameterSpec) -> Any:
    if spec.enum is not None and spec.type in {"integer", "string"}:
        return Literal[tuple(spec.enum)]
    if spec.type == "integer":
        low = int(_INT64.min if spec.minimum is None else spec.minimum)
        return _bounded(int, low, int(_INT64.max if spec.maximum is None else spec.maximum))
    if spec.type == "number":
        return _bounded(float, spec.minimum, spec.maximum)
    return bool if spec.type == "boolean" else str


def _bounded(base: type, minimum: float | None, maximum: float | None) -> Any:
    return base if minimum is None and maximum is None else Annotated[base, Meta(ge=minimum, le=maximum)]
