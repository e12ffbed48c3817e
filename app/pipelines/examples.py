"""What a request of a pipeline looks like: a valid one, and the JSON Schema (2020-12) of the request and the result.

An example is the ``sample``, or has values generated from the types of the required fields. The requests that
``gateway.yaml`` declares for a pipeline are its ``sample`` and its ``examples``, with their files. The schemas are made
from the types that decode and check.
"""

import base64
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from msgspec.structs import replace

from app.codecs.kinds import RANGE_BY_DATATYPE, is_bare_item
from app.core.files import read_regular_file
from app.core.inference import (
    BYTES,
    FLOAT_DATATYPES,
    INTEGER_DATATYPES,
    Array,
    InferenceRequest,
    Tensor,
    bytes_array,
    new_request_id,
)
from app.core.json import COUNT, Schema, enum_of, list_of, with_types
from app.pipelines.fields import Field, InputField, OutputField
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import INDEX, SAMPLE, InputSpec, ParameterSpec, PipelineSpec

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
    """Returns the JSON values by field name: the sample's, or those of required fields. Files are base64."""
    sample = pipeline.spec.sample
    files: dict[str, Field] = {each.name: each for each in pipeline.inputs if each.is_file}
    made = files if sample is not None else {name: each for name, each in pipeline.fields.items() if each.is_required}
    names = made if sample is None else sample
    return {name: _value_of(made[name]) if sample is None or name in made else sample[name] for name in names}


def file_names_of(pipeline: Pipeline) -> dict[str, Sequence[str]]:
    """Returns the paths by field name, for the fields of the example that are file parts in a form."""
    parts = [each for each in pipeline.inputs if each.is_file and (each.is_bare or each.is_list_of_files)]
    values = {each.name: FILE_NAMES[each.spec.kind] for each in parts if each.name in example_of(pipeline)}
    paths = paths_in(pipeline, values | (pipeline.spec.sample or {}))
    return {name: paths[name] for name in values if name in paths}


def _value_of(field: Field) -> Any:
    """Free dimensions get the size 1."""
    spec, is_integer = field.spec, True
    is_text = (spec.kind if isinstance(spec, InputSpec) else spec.type) in (
        "text",
        "string",
        "strings",
        "text_or_tokens",
    )
    if isinstance(field, InputField):
        is_integer = field.tensor.datatype in INTEGER_DATATYPES
    elif field.spec.type == "number":
        is_integer = False
    low = -math.inf if spec.minimum is None else math.ceil(spec.minimum) if is_integer else spec.minimum
    high = math.inf if spec.maximum is None else math.floor(spec.maximum) if is_integer else spec.maximum
    element = spec.enum[0] if spec.enum else "text" if is_text else min(max(0, low), high)
    if not isinstance(field, InputField):
        return {"boolean": False, "object": {}, "integers": [element]}.get(field.spec.type, element)
    if field.tensor.datatype == "BOOL":
        element = False
    element = {"json": {}, "image": PNG_BASE64, "binary": BINARY_BASE64}.get(field.spec.kind, element)
    dims = () if field.is_bare or is_bare_item(field.tensor) else field.tensor.dims
    batch = (1,) * (field.batched and not field.is_bare)
    filled = Filled(element, batch + tuple(1 if dim == -1 else dim for dim in dims))
    return filled if math.prod(filled.shape) > MAX_LISTED else filled.nested()


MAX_FILE_BYTES = 64 * 1024 * 1024
"""gRPC's limit for what Triton is sent."""

Values = Mapping[str, Any]
"""JSON values by field name. A file is a path, relative to the folder of ``gateway.yaml``; several are a list."""


def declared_requests(spec: PipelineSpec) -> dict[str, Values]:
    """Returns the values by name: the sample first, then the examples in the order of the file."""
    sample = {} if spec.sample is None else {SAMPLE: spec.sample}
    return {**sample, **spec.examples}


def paths_in(pipeline: Pipeline, values: Values) -> dict[str, Sequence[str]]:
    """Returns the paths by field name, for the fields that are files."""
    given: Values = {field.name: values.get(field.name) for field in pipeline.inputs if field.is_file}
    listed = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    return {name: paths for name, paths in listed.items() if all(isinstance(path, str) for path in paths)}


def body_of(pipeline: Pipeline, values: Values, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The JSON body of a request with the values. ``folder``: what the paths of files are relative to.

    Raises OSError for a file that cannot be read, TypeError or ValueError for a value that has no JSON form.
    """
    files = {
        name: [read_regular_file(folder / path, max_file_bytes) for path in paths]
        for name, paths in paths_in(pipeline, values).items()
    }
    return body_with(pipeline, values, files)


def body_with(pipeline: Pipeline, values: Values, files: Mapping[str, Sequence[bytes]]) -> bytes:
    """The JSON body of a request with the values. ``files``: contents by field name. Raises TypeError or ValueError."""
    body = dict(values)
    for field in pipeline.inputs:
        if field.is_file and field.name in values:
            if field.name not in files:
                raise TypeError(f"'{field.name}' is not the path of a file")
            texts = [base64.b64encode(content).decode() for content in files[field.name]]
            body[field.name] = texts if isinstance(values[field.name], list) else texts[0]
    return orjson.dumps(body)


VARIATIONS = 4
"""How many different requests are made from the sample."""


def trial_requests(pipeline: Pipeline, folder: Path) -> tuple[list[InferenceRequest], list[InferenceRequest]]:
    """Returns the requests of the sample and the examples, and different requests made from the sample.

    Raises the errors of :func:`body_of`, and GatewayError for an invalid request.
    """
    declared = [
        pipeline.request_of_json(body_of(pipeline, values, folder))
        for values in declared_requests(pipeline.spec).values()
    ]
    specs: dict[str, InputSpec | ParameterSpec] = {each.tensor.name: each.spec for each in pipeline.inputs}
    specs |= {each.tensor.name: each.spec for each in pipeline.parameters if each.tensor is not None}

    def varied(turn: int) -> InferenceRequest:
        inputs = tuple(
            replace(each, array=_varied_array(each, specs[each.name], turn)) if each.name in specs else each
            for each in declared[0].inputs
        )
        return replace(declared[0], inputs=inputs, request_id=new_request_id())

    return declared, list(map(varied, range(1, VARIATIONS + 1)))


def _varied_array(tensor: Tensor, spec: InputSpec | ParameterSpec, turn: int) -> Array:
    """Other values of the same kind, within the declared bounds: in another order where that differs, or other ones."""
    array = tensor.array
    is_text = isinstance(spec, InputSpec) and spec.kind == "text" and tensor.datatype == BYTES
    if isinstance(spec, InputSpec) and spec.kind != "number" and not is_text:
        return array
    if spec.enum:
        value = spec.enum[turn % len(spec.enum)]
        return np.full_like(array, value.encode() if isinstance(value, str) else value)
    if tensor.datatype == BYTES:
        texts = []
        for text in (each.decode(errors="replace") for each in array.flat):
            mixed = text[turn:] + text[:turn] if len(text) > turn else text[::-1]
            texts.append((mixed if mixed != text else f"{text} {'a' * turn}").encode())
        return bytes_array(texts, array.shape)
    if tensor.datatype == "BOOL":
        return ~array
    mixed = np.roll(array.reshape(-1)[::-1], turn).reshape(array.shape)
    if not np.array_equal(mixed, array):
        return mixed
    value, is_float = array.flat[0].item(), tensor.datatype in FLOAT_DATATYPES
    low, high = (-math.inf, math.inf) if is_float else RANGE_BY_DATATYPE[tensor.datatype]
    low = low if spec.minimum is None else max(low, spec.minimum)
    high = high if spec.maximum is None else min(high, spec.maximum)
    moved = [value + turn, value - turn] + ([(value + high) / 2, (value + low) / 2] if is_float else [])
    return np.full_like(array, next((x for x in moved if low <= x <= high and math.isfinite(x)), value))


def request_schema(pipeline: Pipeline) -> Schema:
    request = with_types(next(iter(msgspec.json.schema(pipeline.reader.struct)["$defs"].values())))
    for name, field in pipeline.fields.items():
        schema = request["properties"][name]
        if field.spec.default is not None:
            schema["default"] = field.spec.default
        description = _description(field) if isinstance(field, InputField) else field.spec.description
        if description:
            schema["description"] = description
        sizes: list[tuple[int, int | None]] = []
        if isinstance(field, InputField) and not field.is_bare:
            dims = () if is_bare_item(field.tensor) else field.tensor.dims
            sizes = [(1, pipeline.max_items)] if field.batched else []
            sizes += [(0, None) if dim == -1 else (dim, dim) for dim in dims]
        if field.tensor is not None:
            _add_bounds(schema, field.tensor.datatype, sizes)
    return request


def form_schema(pipeline: Pipeline) -> Schema:
    """The same as ``multipart/form-data``, files as binary parts."""
    request = request_schema(pipeline)
    for field in pipeline.inputs:
        if field.takes_file:
            described = {"description": field.spec.description} if field.spec.description else {}
            file: Schema = {"type": "string", "format": "binary"}
            several = {"type": "array", "items": file, **_length(1, pipeline.max_items)}
            request["properties"][field.name] = {**(several if field.is_list_of_files else file), **described}
    return request


def result_schema(pipeline: Pipeline) -> Schema:
    properties = {field.name: _output_schema(field, joined=pipeline.config.decoupled) for field in pipeline.outputs}
    if pipeline.batch is not None and pipeline.config.decoupled:
        properties = {name: list_of(schema) for name, schema in properties.items()}
    if pipeline.may_exit:
        reason = enum_of([*pipeline.spec.reasons, None])
        each = pipeline.batch is not None
        properties["early_exit"] = {
            **(list_of(reason) if each else reason),
            "description": f"The reason of the early exit{' of each item' if each else ''}, or null.",
        }
    return {"type": "object", "properties": properties, "required": list(properties)}


def event_schema(pipeline: Pipeline) -> Schema:
    """The data of one ``output`` event."""
    properties = {field.name: _output_schema(field, joined=False) for field in pipeline.outputs}
    if pipeline.batch is not None:
        text = "The number of the output's item, or of the first item of its part, from 0."
        properties = {INDEX: {**COUNT, "description": text}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _add_bounds(schema: Schema, datatype: str, sizes: Sequence[tuple[int, int | None]]) -> None:
    """Adds what msgspec's types do not say: fixed dimensions, and the range of the datatype.

    ``sizes``: the smallest and the largest number of items of each list around an element, the outer one first.
    """
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == "array":
            branch.update(_length(*sizes[0]) if sizes else {})
            _add_bounds(branch["items"], datatype, sizes[1:])
        elif branch.get("type") in ("number", "integer") and datatype not in ("FP64", BYTES):
            for key, limit in zip(("minimum", "maximum"), RANGE_BY_DATATYPE[datatype], strict=True):
                branch.setdefault(key, limit)


def _length(low: int, high: int | None) -> Schema:
    return ({"minItems": low} if low else {}) | ({} if high is None else {"maxItems": high})


def _output_schema(field: OutputField, *, joined: bool) -> Schema:
    element: Schema = {}
    if field.is_count:
        element = enum_of(["length", "stop"])
    elif field.spec.kind == "text":
        element = {"type": "string"}
    elif field.spec.kind in ("image", "binary"):
        element = {"type": "string", "contentEncoding": "base64"}
    elif field.spec.kind == "number":
        is_float, is_integer = field.tensor.datatype in FLOAT_DATATYPES, field.tensor.datatype in INTEGER_DATATYPES
        element = {"type": ["number", "null"] if is_float else "integer" if is_integer else "boolean"}
    is_one_value = field.is_bare and (not joined or field.join in ("last", "sum") or field.is_count)
    if joined and field.is_text_run:
        schema: Schema = {"type": "string"}
    elif is_one_value:
        schema = {"anyOf": [element, {"type": "null"}]} if element else {}
    else:
        schema = element
        for _ in range(max(field.depth, 1) if joined else field.depth):
            schema = list_of(schema)
    return schema | {"description": _description(field)}


def _description(field: InputField | OutputField) -> str:
    """The declared description, if there is one, and then the tensor."""
    tensor = f"{field.spec.kind}; tensor {field.tensor.name} {field.tensor.datatype} {list(field.tensor.dims)}"
    return f"{field.spec.description}\n\n{tensor}" if field.spec.description else tensor
