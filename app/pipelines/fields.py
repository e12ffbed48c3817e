"""The fields of a pipeline, compiled for one model signature: inputs, parameters and outputs.

A parameter becomes a parameter of Triton's request, a tensor, or a member of a JSON object in a text tensor.
"""

import base64
import functools
import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from app.codecs import kinds
from app.codecs.json_scan import has_more_elements
from app.codecs.numbers import ANY_NUMBER, Bounds, float_type, integer_type, number_codec, number_type, read_numbers
from app.core.errors import ContractViolation
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, FLOAT_DATATYPES, INTEGER_DATATYPES, Array, Tensor
from app.core.model import TensorSpec
from app.pipelines.spec import InputSpec, OutputSpec, ParameterSpec

MAX_ELEMENTS = 65_536
"""Limit of a list of texts or files with a free dimension, because an element needs more memory than its text."""
MAX_ITEMS = 1024
"""Limit of the elements of a list that is a parameter."""
MAX_TEXT_CHARACTERS = 65_536
"""Limit of a text in such a list."""
MAX_TOKENS = 131_072
"""Limit of the token ids in place of a text."""

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]


class InputField:
    """``json_type``: the type for msgspec's decoder and schema. ``default``: the tensor for a missing field."""

    def __init__(
        self, name: str, spec: InputSpec, tensor: TensorSpec, max_batch_size: int, max_items: int | None
    ) -> None:
        """``max_items``: of a request with a list of items; None if the caller sends one item without a list.

        Raises ValueError if the kind, the bounds, the enum or the default do not match the tensor.
        """
        self.name, self.spec, self.tensor = name, spec, tensor
        self.is_required = spec.is_required
        self.batched = max_items is not None
        """Whether the caller sends a list of items."""
        self._is_item, is_content = kinds.is_bare_item(tensor), kinds.is_one_content(spec.kind, tensor)
        if spec.missing is not None and tensor.datatype not in FLOAT_DATATYPES:
            raise ValueError(f"has missing: nan, which only floating-point numbers can have, not {tensor.datatype}")
        if spec.kind == "json" and (self.batched or not self._is_item):
            raise ValueError("is of kind json, which is one value: the tensor must have dims [1] and no batch: true")
        if is_content and self.batched:
            raise ValueError(
                f"is a file or text in {tensor.datatype}: items of different sizes do not fit in one tensor"
            )
        self._adds_batch = max_batch_size > 0 and not self.batched
        self._depth = self.batched + (0 if self._is_item or is_content else len(tensor.dims))
        """The number of nested lists around an element."""
        self._dims = ((-1,) if self.batched else ()) + tensor.dims
        """The dims of the caller's values, with a batch dimension if the caller sends one; -1 is any size."""
        self.is_bare = self._depth == 0
        """Whether the caller sends a single value instead of a list."""
        self.is_null_a_value = spec.missing is not None and self.is_bare
        """Whether ``null`` is a missing number, and not an absent field."""
        is_number, bounds = spec.kind == "number", Bounds(spec.minimum, spec.maximum, spec.enum)
        self.is_file = spec.kind in ("image", "binary")
        self.takes_file = self.is_file or (
            is_number and bounds == ANY_NUMBER and not self.batched and kinds.holds_bytes(tensor)
        )
        """Whether a file of a form, or a raw body, may be the value: 8-bit numbers may be its bytes."""
        self.is_list_of_files = self.is_file and self.batched and self._is_item
        """Whether each item of a batch is a file: in a form, each file is a part with the name of the field."""
        self._max_elements: int | None = None
        """None: limited only by the size of the body."""
        if spec.kind != "json" and -1 not in tensor.dims:
            self._max_elements = math.prod(tensor.dims) * (max_items or 1)
        elif spec.kind not in ("json", "number"):
            self._max_elements = MAX_ELEMENTS
        self.json_type = self._type_of_json(bounds)
        self._to_array = to_array = _array_reader(spec, tensor, is_content=is_content)
        takes_null = spec.missing is not None
        self._numbers = (
            number_codec(tensor.datatype, to_array, bounds, takes_null=takes_null)
            if (is_number and not self.is_bare)
            else None
        )
        """The codec for lists of numbers."""
        self._allowed = to_array(spec.enum) if spec.enum and is_number else None
        self.default: Tensor | None = None
        if spec.default is not None:
            is_json = spec.kind == "json"
            self.default = self.read(
                msgspec.json.encode(spec.default)
                if is_json
                else kinds.converted(spec.default, self.json_type, "default")
            )

    def _type_of_json(self, bounds: Bounds) -> Any:
        """A single value may be a list of one element. Raises ValueError."""
        spec = self.spec
        element: Any = str
        if spec.kind == "json":
            return msgspec.Raw
        if spec.kind == "number":
            element = number_type(self.tensor.datatype, bounds)
            element = element if spec.missing is None else element | None
        elif spec.kind != "text":
            schema = {"contentEncoding": "base64", "contentMediaType": "image/*" if spec.kind == "image" else "*/*"}
            element = Annotated[str, Meta(extra_json_schema=schema)]
        elif spec.enum:
            element = Literal[tuple(spec.enum)]
        if self.is_bare:
            return element | Annotated[_list_of(element), Meta(min_length=1, max_length=1)]
        return functools.reduce(lambda inner, _: _list_of(inner), range(self._depth), element)

    def decode_large(self, text: memoryview) -> Any:
        """Decodes a large JSON text for ``read``. Raises ValueError or InvalidJson before it uses much memory."""
        if self._numbers is not None:
            return read_numbers(text, self._depth, self._numbers, self._shape_sent)
        if self._max_elements is not None and has_more_elements(text, self._max_elements):
            raise ValueError(f"has more than {self._max_elements} elements")
        return msgspec.json.decode(text, type=self.json_type)

    def value_of_file(self, content: bytes | memoryview) -> bytes | memoryview | Array:
        """The value of a field that :attr:`takes_file`."""
        return (
            content if self.is_file else kinds.numbers_of_bytes(content, self.tensor.datatype).reshape(self.tensor.dims)
        )

    def read(self, value: Any) -> Tensor:
        """Converts a decoded value or array to the tensor for Triton. Raises ValueError."""
        array = value if isinstance(value, np.ndarray) else self._to_array(value)
        if not kinds.fits(array.shape, self._dims):
            array = array.reshape(self._shape_sent(array.shape))
        if self._allowed is not None and not np.isin(array[~np.isnan(array)], self._allowed).all():
            raise ValueError("is not one of the allowed values")
        return Tensor(self.tensor.name, self.tensor.datatype, array[np.newaxis] if self._adds_batch else array)

    def _shape_sent(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape for Triton, without batch dimension, from the caller's shape. Raises ValueError."""
        dims = self._dims
        size = math.prod(shape)
        if self._is_item and (self.batched or size == 1):
            return shape[: self.batched] + self.tensor.dims
        if size == 0 and len(shape) < len(dims):
            shape += tuple(max(dim, 0) for dim in dims[len(shape) :])
        if not kinds.fits(shape, dims):
            raise ValueError(f"has shape {kinds.shape_text(shape)}; expected {kinds.shape_text(dims)}")
        return shape


def _list_of(element: Any) -> Any:
    return list[element]


def _array_reader(spec: InputSpec, tensor: TensorSpec, *, is_content: bool) -> kinds.ToArray:
    """Returns the conversion of decoded values: for kind json from JSON text, for files from base64 or bytes."""
    to_elements = kinds.to_array_of("binary" if spec.base64 or spec.data_url else spec.kind, tensor.datatype)
    to_array: kinds.ToArray = (lambda value: to_elements(value).reshape(tensor.dims)) if is_content else to_elements

    def file_of(value: Any) -> Any:
        """The file as the model takes it, from the bytes of a form or the base64 of JSON; lists keep their nesting."""
        if isinstance(value, list):
            return [file_of(item) for item in value]
        content = kinds.bytes_of_base64(value, spec.kind) if isinstance(value, str) else value
        if not spec.base64 and not spec.data_url:
            return content
        media_type = kinds.check_image(content) if spec.kind == "image" else ""
        return (b"data:%b;base64," % media_type.encode() if spec.data_url else b"") + base64.b64encode(content)

    if spec.kind == "json":
        return lambda value: to_array(kinds.json_bytes_of(value))
    return (lambda value: to_array(file_of(value))) if spec.kind in ("image", "binary") else to_array


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


class ParameterField:
    """``tensor``: the input that has the value alone. ``json_tensor``: the text input whose JSON object has it."""

    def __init__(
        self,
        name: str,
        spec: ParameterSpec,
        tensor: TensorSpec | None = None,
        json_tensor: TensorSpec | None = None,
        max_batch_size: int = 0,
    ) -> None:
        """Raises ValueError if the bounds, the enum, the default or the tensor do not match."""
        self.name, self.spec, self.tensor, self.json_tensor = name, spec, tensor, json_tensor
        self.is_required, self._is_list = spec.is_required, spec.type in _LISTS
        if tensor is not None:
            if tensor.datatype not in _DATATYPES_BY_TYPE[spec.type]:
                raise ValueError(f"is of type {spec.type}, which does not fit {tensor.datatype}")
            if len(tensor.dims) != 1 if self._is_list else any(dim not in (-1, 1) for dim in tensor.dims):
                what = "a list" if self._is_list else "one value"
                raise ValueError(f"is {what}, which does not fit the dimensions {kinds.shape_text(tensor.dims)}")
            kind = {"object": "json", "string": "text", "strings": "text"}.get(spec.type, "number")
            self._to_array = kinds.to_array_of(kind, tensor.datatype)
        if json_tensor is not None and (json_tensor.datatype != BYTES or json_tensor.dims not in ((1,), (-1,), ())):
            text = f"{json_tensor.datatype} {kinds.shape_text(json_tensor.dims)}"
            raise ValueError(f"is a member of '{json_tensor.name}', which is {text} and not a single text")
        outer, _, member = (spec.member or name).removesuffix("[]").rpartition(".")
        self.place = (outer, member)
        """The place in the JSON object: the nested object that has the value, or an empty name, and its name there."""
        self._has_batch = max_batch_size > 0
        self.json_type = self._type_of_json()
        for key, value in (("default", spec.default), ("value", spec.send)):
            if value is not None:
                self.converted(value, key)

    def _type_of_json(self) -> Any:
        """Raises ValueError."""
        spec, bounds = self.spec, Bounds(self.spec.minimum, self.spec.maximum, self.spec.enum)
        if spec.type == "number":
            return float_type(bounds)
        if spec.type == "object":
            return dict[str, Any]
        if spec.type == "text_or_tokens":
            return str | TokenIds
        if spec.type in ("string", "boolean"):
            return Literal[tuple(spec.enum)] if spec.enum else str if spec.type == "string" else bool
        element: Any = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARACTERS)]
        if spec.type != "strings":
            element = integer_type("INT64" if self.tensor is None else self.tensor.datatype, bounds)
        if not self._is_list:
            return element
        size = -1 if self.tensor is None else self.tensor.dims[0]
        listed = Annotated[list[element], Meta(min_length=max(size, 1), max_length=MAX_ITEMS if size == -1 else size)]
        return element | listed if spec.type == "strings" else listed

    def converted(self, value: Any, name: str = "value") -> Any:
        """Checks a value of the configuration like a caller's, and returns it. Raises ValueError."""
        return self.checked(kinds.converted(value, self.json_type, name))

    def checked(self, value: Any) -> Any:
        """Checks a decoded value and returns the value to send. Raises ValueError."""
        if self._is_list:
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
        array = self._to_array(kinds.encoded_json(value) if self.spec.type == "object" else value)
        if not self._is_list:
            array = array.reshape(self.tensor.dims)
        return repeated(self.tensor, array, items if self._has_batch else None)

    def put(self, value: Any, members: dict[str, Any]) -> None:
        """Writes a checked value into the JSON object. Raises ValueError."""
        outer, name = self.place
        if self.spec.as_text:
            value = kinds.encoded_json(value).decode()
        around = members.setdefault(outer, {}) if outer else members
        around[name] = [value] if (self.spec.member or "").endswith("[]") else value


Field = InputField | ParameterField


def repeated(tensor: TensorSpec, array: Array, items: int | None) -> Tensor:
    """``items``: of a batch; None for a model without batches."""
    return Tensor(tensor.name, tensor.datatype, array if items is None else np.repeat(array[np.newaxis], items, axis=0))


class OutputField:
    """One output of a pipeline, compiled for one model signature."""

    is_reasoning = False
    """Whether the value comes from the text of another output."""

    def __init__(self, name: str, spec: OutputSpec, tensor: TensorSpec, max_batch_size: int, *, has_rows: bool) -> None:
        """``has_rows``: a response has a row for each item of the request. Raises ValueError."""
        self.name, self.spec, self.tensor, self._has_rows = name, spec, tensor, has_rows
        self._is_content = kinds.is_one_content(spec.kind, tensor)
        """Whether the whole tensor is one text or file, and not each element."""
        is_item = self._is_content or kinds.is_bare_item(tensor)
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
        is_list_of_items = self.depth == 1 and is_item
        self.empty_value: Any = None if self.is_bare else []
        self.empty_item: Any = None if is_list_of_items else []
        """The empty value of one item of a batch."""
        self.may_be_empty = spec.single or -1 in self._dims
        """Whether an array of the declared shape may have no elements."""
        from_array = kinds.from_array_of(spec.kind, tensor.datatype, is_single=self.is_bare)

        def value_of(array: Array) -> Any:
            try:
                value = from_array(array.reshape(-1) if is_list_of_items else array)
            except ValueError as exc:
                raise ContractViolation(f"Output '{tensor.name}' is not JSON.", tensor=tensor.name) from exc
            return None if spec.none is not None and value == spec.none else value

        self.value_of = from_array if spec.kind == "number" and not is_list_of_items else value_of
        """Returns the value of a non-empty array. Raises ContractViolation if the bytes are not valid JSON."""

    def array_of(self, tensor: Tensor, items: int = 1) -> Array:
        """The array without its batch dimension. ``items``: of the request, if a response has a row for each.

        Triton checks no output, so many models write shapes and datatypes that differ a little from the declared ones.
        The array is as declared if its elements are: dimensions of size 1 may be missing or extra, and numbers may have
        another datatype if the declared one holds them. An empty array may have any shape and datatype.

        Raises ContractViolation if the elements are not the declared ones.
        """
        array, declared = tensor.array, self.tensor.datatype
        if not array.size and not (
            self._is_content and tensor.datatype == declared and kinds.fits(array.shape, self._dims)
        ):
            return array
        if tensor.datatype != declared:
            as_declared = kinds.as_datatype(array, declared)
            if as_declared is None:
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
            array = as_declared
        if array.shape != self._dims and not kinds.fits(array.shape, self._dims):
            shape = kinds.declared_shape(array.shape, (items, *self.tensor.dims) if self._has_rows else self._dims)
            if shape is None:
                raise self.other_shape(array.shape)
            array = array.reshape(shape)
        array = array[0] if self._takes_batch else array
        return kinds.bytes_of_numbers(array, len(self.tensor.dims)) if self._is_content else array

    def other_shape(self, shape: tuple[int, ...]) -> ContractViolation:
        """The violation of a model that wrote this shape."""
        name, dims = self.tensor.name, kinds.shape_text(self._dims)
        if 0 in shape:
            hint = f"If the model may write none, declare an early_exit rule with empty: [{name}] in gateway.yaml."
        elif self._takes_batch and shape and kinds.declared_shape(shape, (shape[0], *self._dims[1:])):
            hint = f"The model wrote {shape[0]} rows for one item. With batch: true the answer has all rows."
        else:
            hint = (
                f"Write {dims} in the model, or correct `dims` of '{name}' in its config.pbtxt. Dimensions of size 1 "
                "may be missing or extra, if it is clear which."
            )
        return ContractViolation(
            f"Output '{name}' has shape {kinds.shape_text(shape)}; {dims} is declared.", tensor=name, hint=hint
        )


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
