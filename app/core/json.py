"""Renders values as JSON with orjson, and builds JSON Schemas.

orjson holds the interpreter's lock for its whole call. Large arrays are written in slices, between which the event loop
does other work: docs/decisions/0005-bodies-and-json.md.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import orjson

from app.core.inference import Array

NUMBERS_AT_ONCE = 8192
"""The size of a slice, which takes 0.2 ms to write."""
ITEMS_AT_ONCE = 256
"""The items of a list, of a batch or of a model's responses, that are written at once."""
PART_BYTES = 1024 * 1024
"""The size of a part: a larger text would be copied too often while it grows."""


def json_of(value: Any) -> bytes:
    """Renders numpy arrays as lists, NaN and infinity as ``null``."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def is_large(values: Mapping[str, Any]) -> bool:
    """Whether the values contain an array or a list that takes too long to write at once."""
    for value in values.values():
        if isinstance(value, np.ndarray):
            if value.size > NUMBERS_AT_ONCE:
                return True
        elif isinstance(value, list) and len(value) > ITEMS_AT_ONCE:
            return True
    return False


async def json_in_turns(values: Mapping[str, Any]) -> list[bytearray]:
    """Returns the JSON object of large values in parts of about PART_BYTES; the event loop runs after each piece."""
    parts = [bytearray()]
    for piece in _pieces_of(values):
        if len(parts[-1]) >= PART_BYTES:
            parts.append(bytearray())
        parts[-1] += piece
        await asyncio.sleep(0)
    return parts


def _pieces_of(values: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    before = b"{"
    for name, value in values.items():
        yield before + json_of(name) + b":"
        if isinstance(value, np.ndarray):
            yield from _slices_of(value)
        elif isinstance(value, list):
            yield b"["
            for start in range(0, len(value), ITEMS_AT_ONCE):
                yield b"," if start else b""
                yield memoryview(json_of(value[start : start + ITEMS_AT_ONCE]))[1:-1]
            yield b"]"
        else:
            yield json_of(value)
        before = b","
    yield b"}"


def _slices_of(array: Array) -> Iterator[bytes | memoryview]:
    """Yields the JSON of an array in slices of about NUMBERS_AT_ONCE numbers."""
    if array.size <= NUMBERS_AT_ONCE:
        yield json_of(array)
        return
    before, rows = b"[", max(NUMBERS_AT_ONCE * len(array) // array.size, 1)
    for start in range(0, len(array), rows):
        yield before
        if rows == 1 and array.ndim > 1:
            yield from _slices_of(array[start])
        else:
            yield memoryview(json_of(array[start : start + rows]))[1:-1]
        before = b","
    yield b"]"


Schema = dict[str, Any]
"""A part of a JSON Schema (2020-12), in the form that code generators for OpenAPI understand."""
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def list_of(item: Any) -> Schema:
    return {"type": "array", "items": item}


def object_of(properties: Schema, *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


_TYPE_OF: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
    list: "array",
    dict: "object",
}


def enum_of(values: Iterable[Any]) -> Schema:
    """Describes one of several single values. Without ``type``, generators lose ``null``."""
    listed = list(values)
    types = list(dict.fromkeys(_TYPE_OF[type(value)] for value in listed))
    return {"type": types[0] if len(types) == 1 else types, "enum": listed}


def const_of(value: Any) -> Schema:
    return {"type": _TYPE_OF[type(value)], "const": value}


def one_of(schemas: Sequence[Any], key: str = "oneOf") -> Any:
    """A single schema needs no ``oneOf`` or ``anyOf``."""
    return schemas[0] if len(schemas) == 1 else {key: list(schemas)}


def schema_of(type_: Any) -> Schema:
    """The JSON Schema of a type, without references and defaults."""
    schema = msgspec.json.schema(type_)
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].rpartition("/")[2]])
        members = {name: inlined(each) for name, each in value.items() if name not in _NOT_INLINED}
        if "properties" in value:
            members["properties"] = {name: inlined(each) for name, each in value["properties"].items()}
        return members

    return with_types(inlined(schema))


_NOT_INLINED = {"title", "default", "discriminator", "properties"}


def with_types(schema: Schema) -> Schema:
    """Adds what generators need, and schemas of msgspec lack. Changes the schema in place."""
    if "enum" in schema and "type" not in schema:
        schema["type"] = enum_of(schema["enum"])["type"]
    if schema.get("type") == "array":
        schema.setdefault("items", {})
    members = [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    for inner in (*schema.get("anyOf", ()), *schema.get("properties", {}).values(), *members):
        with_types(inner)
    return schema
