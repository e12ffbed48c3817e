"""The inputs of a request, compiled for one model signature."""

import base64
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from app.codecs.json_scan import has_more_elements
from app.codecs.kinds import (
    ToArray,
    bytes_of_base64,
    check_image,
    converted,
    fits,
    holds_bytes,
    is_bare_item,
    is_one_content,
    json_bytes_of,
    numbers_of_bytes,
    shape_text,
    to_array_of,
)
from app.codecs.numbers import ANY_NUMBER, Bounds, NumberCodec, number_codec, number_type, read_numbers
from app.core.inference import FLOAT_DATATYPES, Array, Tensor
from app.core.model import TensorSpec
from app.pipelines.spec import InputSpec

MAX_ELEMENTS = 65_536
"""Limit of a list of texts or files with a free dimension, because an element needs more memory than its text."""

_FILE_KINDS = {"image", "binary"}


@dataclass(frozen=True, slots=True)
class InputField:
    """``json_type``: the type for msgspec's decoder and schema. ``default``: the tensor for a missing field."""

    name: str
    spec: InputSpec
    tensor: TensorSpec
    json_type: Any
    batched: bool
    """Whether the caller sends a list of items."""
    adds_batch: bool
    _depth: int
    """The number of nested lists around an element."""
    _max_elements: int | None
    """None: limited only by the size of the body."""
    _to_array: ToArray
    _numbers: NumberCodec | None
    """The codec for lists of numbers."""
    _dims: tuple[int, ...]
    """The dims of the caller's values, with a batch dimension if the caller sends one; -1 is any size."""
    _allowed: Array | None
    default: Tensor | None = None

    @classmethod
    def compile(
        cls, name: str, spec: InputSpec, tensor: TensorSpec, *, max_batch_size: int, max_items: int | None
    ) -> "InputField":
        """``max_items``: of a request with a list of items; None if the caller sends one item without a list.

        Raises ValueError if the kind, the bounds, the enum or the default do not match the tensor.
        """
        batch = max_items is not None
        if spec.missing is not None and tensor.datatype not in FLOAT_DATATYPES:
            raise ValueError(f"has missing: nan, which only floating-point numbers can have, not {tensor.datatype}")
        if spec.kind == "json" and (batch or not is_bare_item(tensor)):
            raise ValueError("is of kind json, which is one value: the tensor must have dims [1] and no batch: true")
        is_content = is_one_content(spec.kind, tensor)
        if is_content and batch:
            raise ValueError(
                f"is a file or text in {tensor.datatype}: items of different sizes do not fit in one tensor"
            )
        depth = batch + (0 if is_bare_item(tensor) or is_content else len(tensor.dims))
        to_array = _to_array_of(spec, tensor)
        field = cls(
            name=name,
            spec=spec,
            tensor=tensor,
            json_type=_input_type(spec, tensor, depth=depth),
            batched=batch,
            adds_batch=max_batch_size > 0 and not batch,
            _depth=depth,
            _max_elements=_max_elements(spec, tensor, max_items or 1),
            _to_array=to_array,
            _numbers=(
                number_codec(tensor.datatype, to_array, _bounds_of(spec), takes_null=spec.missing is not None)
                if spec.kind == "number" and depth
                else None
            ),
            _dims=((-1,) if batch else ()) + tensor.dims,
            _allowed=to_array(spec.enum) if spec.enum and spec.kind == "number" else None,
        )
        if spec.default is None:
            return field
        is_json = spec.kind == "json"
        value = msgspec.json.encode(spec.default) if is_json else converted(spec.default, field.json_type, "default")
        return dataclasses.replace(field, default=field.read(value))

    @property
    def is_bare(self) -> bool:
        """Whether the caller sends a single value instead of a list."""
        return self._depth == 0

    @property
    def is_file(self) -> bool:
        return self.spec.kind in _FILE_KINDS

    @property
    def takes_file(self) -> bool:
        """Whether a file of a form, or a raw body, may be the value: 8-bit numbers may be its bytes."""
        is_free = _bounds_of(self.spec) == ANY_NUMBER and not self.batched
        return self.is_file or (self.spec.kind == "number" and is_free and holds_bytes(self.tensor))

    @property
    def is_list_of_files(self) -> bool:
        """Whether each item of a batch is a file: in a form, each file is a part with the name of the field."""
        return self.is_file and self.batched and is_bare_item(self.tensor)

    @property
    def is_null_a_value(self) -> bool:
        """Whether ``null`` is a missing number, and not an absent field."""
        return self.spec.missing is not None and self._depth == 0

    @property
    def is_required(self) -> bool:
        return self.spec.is_required

    def decode_large(self, text: memoryview) -> Any:
        """Decodes a large JSON text for ``read``. Raises ValueError or InvalidJson before it uses much memory."""
        if self._numbers is not None:
            return read_numbers(text, self._depth, self._numbers, self._shape_sent)
        if self._max_elements is not None and has_more_elements(text, self._max_elements):
            raise ValueError(f"has more than {self._max_elements} elements")
        return msgspec.json.decode(text, type=self.json_type)

    def value_of_file(self, content: bytes | memoryview) -> bytes | memoryview | Array:
        """The value of a field that :attr:`takes_file`."""
        return content if self.is_file else numbers_of_bytes(content, self.tensor.datatype).reshape(self.tensor.dims)

    def read(self, value: Any) -> Tensor:
        """Converts a decoded value or array to the tensor for Triton. Raises ValueError."""
        array = value if isinstance(value, np.ndarray) else self._to_array(value)
        if not fits(array.shape, self._dims):
            array = array.reshape(self._shape_sent(array.shape))
        if self._allowed is not None and not np.isin(array[~np.isnan(array)], self._allowed).all():
            raise ValueError("is not one of the allowed values")
        return Tensor(self.tensor.name, self.tensor.datatype, array[np.newaxis] if self.adds_batch else array)

    def _shape_sent(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape for Triton, without batch dimension, from the caller's shape. Raises ValueError."""
        dims = self._dims
        size = math.prod(shape)
        if is_bare_item(self.tensor) and (self.batched or size == 1):
            return shape[: self.batched] + self.tensor.dims
        if size == 0 and len(shape) < len(dims):
            shape += tuple(max(dim, 0) for dim in dims[len(shape) :])
        if not fits(shape, dims):
            raise ValueError(f"has shape {shape_text(shape)}; expected {shape_text(dims)}")
        return shape


def _to_array_of(spec: InputSpec, tensor: TensorSpec) -> ToArray:
    """Returns the conversion of decoded values: for kind json from JSON text, for files from base64 or bytes."""
    to_elements = to_array_of("binary" if spec.base64 or spec.data_url else spec.kind, tensor.datatype)
    is_content = is_one_content(spec.kind, tensor)
    to_array: ToArray = (lambda value: to_elements(value).reshape(tensor.dims)) if is_content else to_elements
    if spec.kind == "json":
        return lambda value: to_array(json_bytes_of(value))
    if spec.base64 or spec.data_url:
        return lambda value: to_array(_encoded(value, spec))
    if spec.kind in _FILE_KINDS:
        return lambda value: to_array(_content_of(value, spec.kind))
    return to_array


def _max_elements(spec: InputSpec, tensor: TensorSpec, items: int) -> int | None:
    """The limit of elements: as declared by the dims, otherwise MAX_ELEMENTS; None for numbers with free dims."""
    if spec.kind == "json":
        return None
    if -1 not in tensor.dims:
        return math.prod(tensor.dims) * items
    return None if spec.kind == "number" else MAX_ELEMENTS


def _content_of(value: Any, kind: str) -> Any:
    """Returns the bytes of a file, from the bytes of a form or the base64 of JSON; lists keep their nesting."""
    if isinstance(value, list):
        return [_content_of(item, kind) for item in value]
    return bytes_of_base64(value, kind) if isinstance(value, str) else value


def _encoded(value: Any, spec: InputSpec) -> Any:
    """Returns a file as base64 or a data URL, for models that decode it themselves; lists keep their nesting."""
    if isinstance(value, list):
        return [_encoded(item, spec) for item in value]
    content = _content_of(value, spec.kind)
    head = b"data:%b;base64," % check_image(content).encode() if spec.kind == "image" else b""
    return b"".join([head if spec.data_url else b"", base64.b64encode(content)])


def _input_type(spec: InputSpec, tensor: TensorSpec, *, depth: int) -> Any:
    """``depth``: nested lists around an element; a single value may be a list of one element. Raises ValueError."""
    if spec.kind == "json":
        return msgspec.Raw
    if spec.kind == "number":
        element = number_type(tensor.datatype, _bounds_of(spec))
        element = element if spec.missing is None else element | None
    elif spec.kind == "text":
        element = Literal[tuple(spec.enum)] if spec.enum else str
    else:
        schema = {"contentEncoding": "base64", "contentMediaType": "image/*" if spec.kind == "image" else "*/*"}
        element = Annotated[str, Meta(extra_json_schema=schema)]
    if depth == 0:
        return element | Annotated[_list_of(element), Meta(min_length=1, max_length=1)]
    return functools.reduce(lambda inner, _: _list_of(inner), range(depth), element)


def _list_of(element: Any) -> Any:
    return list[element]


def _bounds_of(spec: InputSpec) -> Bounds:
    return Bounds(spec.minimum, spec.maximum, spec.enum)
