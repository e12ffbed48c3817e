"""The JSON Schema (2020-12) of a pipeline's request and result, from the types that decode and check them."""

from collections.abc import Sequence

import msgspec

from app.codecs.kinds import LARGEST_BY_DATATYPE, is_bare_item
from app.core.inference import FLOAT_DATATYPES, INTEGER_DATATYPES
from app.core.json import COUNT, Schema, enum_of, list_of, with_types
from app.pipelines.fields import InputField, OutputField, ParameterField
from app.pipelines.pipeline import Pipeline
from app.pipelines.spec import INDEX

_LARGEST = {**LARGEST_BY_DATATYPE, "UINT64": 2**64 - 1}
"""The datatypes whose bounds msgspec's types cannot express completely, and FP64, which has those of JSON's numbers."""


def request_schema(pipeline: Pipeline) -> Schema:
    request = with_types(next(iter(msgspec.json.schema(pipeline.reader.struct)["$defs"].values())))
    fields: list[InputField | ParameterField] = [*pipeline.inputs, *pipeline.parameters]
    for field in fields:
        schema = request["properties"][field.name]
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
    if pipeline.rules:
        reasons = list(dict.fromkeys(rule.reason for rule in pipeline.rules.rules))
        reason = enum_of([*reasons, None])
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
        elif branch.get("type") in ("number", "integer") and datatype in _LARGEST and datatype != "FP64":
            largest = _LARGEST[datatype]
            branch.setdefault("minimum", -largest)
            branch.setdefault("maximum", largest)


def _length(low: int, high: int | None) -> Schema:
    return ({"minItems": low} if low else {}) | ({} if high is None else {"maxItems": high})


def _output_schema(field: OutputField, *, joined: bool) -> Schema:
    element, depth = _element_schema(field), field.depth
    is_one_value = field.is_bare and (not joined or field.join in ("last", "sum") or field.is_count)
    if joined and field.is_text_run:
        schema: Schema = {"type": "string"}
    elif is_one_value:
        schema = {"anyOf": [element, {"type": "null"}]} if element else {}
    else:
        schema = element
        for _ in range(max(depth, 1) if joined else depth):
            schema = list_of(schema)
    return schema | {"description": _description(field)}


def _element_schema(field: OutputField) -> Schema:
    if field.is_count:
        return enum_of(["length", "stop"])
    if field.spec.kind == "json":
        return {}
    if field.spec.kind != "number":
        return {"type": "string"} if field.spec.kind == "text" else {"type": "string", "contentEncoding": "base64"}
    if field.tensor.datatype in INTEGER_DATATYPES:
        return {"type": "integer"}
    return {"type": ["number", "null"]} if field.tensor.datatype in FLOAT_DATATYPES else {"type": "boolean"}


def _description(field: InputField | OutputField) -> str:
    """The declared description, if there is one, and then the tensor."""
    tensor = f"{field.spec.kind}; tensor {field.tensor.name} {field.tensor.datatype} {list(field.tensor.dims)}"
    return f"{field.spec.description}\n\n{tensor}" if field.spec.description else tensor
