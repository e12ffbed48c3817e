"""A valid request of a pipeline: its ``sample``, or values generated from the types of its required fields."""

import functools
import math
from dataclasses import dataclass
from typing import Any

from app.domain.tensor import INTEGER_DATATYPES
from app.pipelines.fields import InputField, ParameterField
from app.pipelines.pipeline import Pipeline
from app.pipelines.shapes import is_bare_item
from app.pipelines.spec import InputSpec, ParameterSpec

MAX_LISTED = 256
"""Limit of the elements that a generated value lists."""
PNG_BASE64 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEANl9ngAAAAABJRU5ErkJggg=="
"""A white image of one pixel."""
BINARY_BASE64 = "AAECAw=="
FILE_NAMES = {"image": "image.png", "binary": "file.bin"}


@dataclass(frozen=True, slots=True)
class Filled:
    """A nested list with equal elements that is too large to list. Its ``repr`` is a Python expression."""

    element: Any
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return functools.reduce(lambda text, size: f"[{text}] * {size}", reversed(self.shape), repr(self.element))

    def nested(self) -> Any:
        return functools.reduce(lambda value, size: [value] * size, reversed(self.shape), self.element)


def example_of(pipeline: Pipeline) -> dict[str, Any]:
    """Returns the JSON values by field name. Files are base64."""
    if pipeline.spec.sample is None:
        return {field.name: _value_of(field) for field in _required(pipeline)}
    files = {field.name: field for field in pipeline.inputs if field.is_file}
    sample = pipeline.spec.sample.items()
    return {name: _value_of(files[name]) if name in files else value for name, value in sample}


def file_names_of(pipeline: Pipeline) -> dict[str, str]:
    """Returns path by field name, for the fields of the example that are file parts in a form."""
    given = pipeline.spec.sample or {}
    names = given if pipeline.spec.sample is not None else {field.name for field in _required(pipeline)}
    return {
        field.name: str(given.get(field.name, FILE_NAMES[field.spec.kind]))
        for field in pipeline.inputs
        if field.is_file and field.is_bare and field.name in names
    }


def _required(pipeline: Pipeline) -> list[InputField | ParameterField]:
    fields: list[InputField | ParameterField] = [*pipeline.inputs, *pipeline.parameters]
    return [field for field in fields if field.is_required]


def _value_of(field: InputField | ParameterField) -> Any:
    if isinstance(field, ParameterField):
        return _parameter_value(field)
    filled = Filled(_element(field), _shape(field))
    return filled if math.prod(filled.shape) > MAX_LISTED else filled.nested()


def _shape(field: InputField) -> tuple[int, ...]:
    """Free dimensions get the size 1."""
    if field.is_bare:
        return ()
    dims = () if is_bare_item(field.tensor) else field.tensor.dims
    return (1,) * field.batched + tuple(1 if dim == -1 else dim for dim in dims)


def _element(field: InputField) -> Any:
    kind, datatype = field.spec.kind, field.tensor.datatype
    if kind == "number":
        return False if datatype == "BOOL" else _number(field.spec, is_integer=datatype in INTEGER_DATATYPES)
    if kind == "text":
        return field.spec.enum[0] if field.spec.enum else "text"
    if kind == "json":
        return {}
    return PNG_BASE64 if kind == "image" else BINARY_BASE64


def _parameter_value(field: ParameterField) -> Any:
    spec = field.spec
    if spec.type == "boolean":
        return False
    if spec.type == "string":
        return spec.enum[0] if spec.enum else "text"
    return _number(spec, is_integer=spec.type == "integer")


def _number(spec: InputSpec | ParameterSpec, *, is_integer: bool) -> Any:
    """Returns 0, or the bound closest to 0."""
    if spec.enum:
        return spec.enum[0]
    low = -math.inf if spec.minimum is None else math.ceil(spec.minimum) if is_integer else spec.minimum
    high = math.inf if spec.maximum is None else math.floor(spec.maximum) if is_integer else spec.maximum
    return min(max(0, low), high)
