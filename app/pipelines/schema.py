"""The JSON Schema (2020-12) of a pipeline's request and result, from the very types that decode and check them."""

from typing import Any

import msgspec

from app.domain.model import TensorSpec
from app.domain.tensor import FLOAT_DATATYPES, INTEGER_DATATYPES
from app.pipelines.fields import InputField, ParameterField
from app.pipelines.outputs import OutputField
from app.pipelines.pipeline import Pipeline

Schema = dict[str, Any]


def request_schema(pipeline: Pipeline) -> Schema:
    schema = msgspec.json.schema(pipeline.reader.struct)
    request: Schema = next(iter(schema["$defs"].values()))
    fields: list[InputField | ParameterField] = [*pipeline.inputs, *pipeline.parameters]
    for field in fields:
        _describe_field(field, request["properties"][field.name])
    return request


def form_schema(pipeline: Pipeline) -> Schema:
    """The same as ``multipart/form-data``, files as binary parts."""
    request = request_schema(pipeline)
    for field in pipeline.inputs:
        if field.is_file:
            request["properties"][field.name] = {"type": "string", "format": "binary"}
    return request


def result_schema(pipeline: Pipeline) -> Schema:
    properties = {field.name: _output_schema(field, joined=pipeline.config.decoupled) for field in pipeline.outputs}
    if pipeline.rules:
        reasons = list(dict.fromkeys(rule.reason for rule in pipeline.rules.rules))
        properties["early_exit"] = {"enum": [*reasons, None], "description": "Why there was nothing to do, or null."}
    return {"type": "object", "properties": properties, "required": list(properties)}


def event_schema(pipeline: Pipeline) -> Schema:
    """The data of one ``output`` event."""
    properties = {field.name: _output_schema(field, joined=False) for field in pipeline.outputs}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _describe_field(field: InputField | ParameterField, schema: Schema) -> None:
    if field.spec.default is not None:
        schema["default"] = field.spec.default
    if isinstance(field, InputField):
        schema["description"] = f"{field.spec.kind}; tensor {_tensor_text(field.tensor)}"


def _output_schema(field: OutputField, *, joined: bool) -> Schema:
    element = _element_schema(field)
    if joined:
        schema = _joined_schema(field, element)
    elif field.is_bare:
        schema = {"anyOf": [element, {"type": "null"}]} if element else {}
    else:
        schema = _nested(element, field.depth)
    return schema | {"description": f"{field.spec.kind}; tensor {_tensor_text(field.tensor)}"}


def _joined_schema(field: OutputField, element: Schema) -> Schema:
    if field.is_text_run:
        return {"type": "string"}
    if field.join == "last" and field.is_bare:
        return {"anyOf": [element, {"type": "null"}]} if element else {}
    return _nested(element, max(field.depth, 1))


def _nested(element: Schema, depth: int) -> Schema:
    for _ in range(depth):
        element = {"type": "array", "items": element}
    return element


def _element_schema(field: OutputField) -> Schema:
    if field.spec.kind == "number":
        return _number_schema(field.tensor.datatype)
    if field.spec.kind == "json":
        return {}
    return {"type": "string"} if field.spec.kind == "text" else {"type": "string", "contentEncoding": "base64"}


def _number_schema(datatype: str) -> Schema:
    if datatype in INTEGER_DATATYPES:
        return {"type": "integer"}
    return {"type": ["number", "null"]} if datatype in FLOAT_DATATYPES else {"type": "boolean"}


def _tensor_text(tensor: TensorSpec) -> str:
    return f"{tensor.name} {tensor.datatype} {list(tensor.dims)}"
