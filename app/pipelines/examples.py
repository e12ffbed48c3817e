"""A valid request of a pipeline: its ``sample``, or values generated from the types of its required fields.

The requests that ``gateway.yaml`` declares for a pipeline, its ``sample`` and its ``examples``, with their files.
"""

import base64
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.codecs.kinds import is_bare_item
from app.config.document import read_regular_file
from app.core.inference import INTEGER_DATATYPES
from app.pipelines.inputs import InputField
from app.pipelines.parameters import ParameterField
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import SAMPLE, InputSpec, ParameterSpec, PipelineSpec

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
    """Free dimensions get the size 1."""
    spec = field.spec
    if isinstance(field, ParameterField):
        if field.spec.type in ("string", "strings", "text_or_tokens"):
            return spec.enum[0] if spec.enum else "text"
        number = _number(spec, is_integer=field.spec.type != "number")
        return {"boolean": False, "object": {}, "integers": [number]}.get(field.spec.type, number)
    kind, datatype, element = field.spec.kind, field.tensor.datatype, None
    if kind == "number":
        element = False if datatype == "BOOL" else _number(spec, is_integer=datatype in INTEGER_DATATYPES)
    elif kind == "text":
        element = spec.enum[0] if spec.enum else "text"
    else:
        element = {"json": {}, "image": PNG_BASE64, "binary": BINARY_BASE64}[kind]
    dims = () if field.is_bare or is_bare_item(field.tensor) else field.tensor.dims
    filled = Filled(
        element, (1,) * (field.batched and not field.is_bare) + tuple(1 if dim == -1 else dim for dim in dims)
    )
    return filled if math.prod(filled.shape) > MAX_LISTED else filled.nested()


def _number(spec: InputSpec | ParameterSpec, *, is_integer: bool) -> Any:
    """Returns 0, or the bound closest to 0."""
    if spec.enum:
        return spec.enum[0]
    low = -math.inf if spec.minimum is None else math.ceil(spec.minimum) if is_integer else spec.minimum
    high = math.inf if spec.maximum is None else math.floor(spec.maximum) if is_integer else spec.maximum
    return min(max(0, low), high)


MAX_FILE_BYTES = 64 * 1024 * 1024
"""gRPC's limit for what Triton is sent."""

Values = Mapping[str, Any]
"""JSON values by field name. A file is a path, relative to the folder of ``gateway.yaml``."""


def declared_requests(spec: PipelineSpec) -> dict[str, Values]:
    """Returns the values by name: the sample first, then the examples in the order of the file."""
    sample = {} if spec.sample is None else {SAMPLE: spec.sample}
    return {**sample, **spec.examples}


def paths_in(pipeline: Pipeline, values: Values) -> dict[str, str]:
    """Returns path by field name, for the fields that are files."""
    given = {field.name: values.get(field.name) for field in pipeline.inputs if field.is_file}
    return {name: path for name, path in given.items() if isinstance(path, str)}


def body_of(pipeline: Pipeline, values: Values, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The JSON body of a request with the values. ``folder``: what the paths of files are relative to.

    Raises OSError for a file that cannot be read, TypeError or ValueError for a value that has no JSON form.
    """
    paths = paths_in(pipeline, values)
    return body_with(
        pipeline, values, {name: read_regular_file(folder / path, max_file_bytes) for name, path in paths.items()}
    )


def body_with(pipeline: Pipeline, values: Values, files: Mapping[str, bytes]) -> bytes:
    """The JSON body of a request with the values. ``files``: content by field name. Raises TypeError or ValueError."""
    for field in pipeline.inputs:
        if field.is_file and field.name in values and field.name not in files:
            raise TypeError(f"'{field.name}' is not the path of a file")
    encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return orjson.dumps({**values, **encoded})


def sample_body(pipeline: Pipeline, folder: Path) -> bytes:
    """The JSON body of the pipeline's sample. Raises OSError, TypeError or ValueError."""
    return body_of(pipeline, pipeline.spec.sample or {}, folder)
