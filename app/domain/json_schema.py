"""Parts of JSON Schemas (2020-12) in the form that code generators for OpenAPI understand."""

from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any

Schema = dict[str, Any]

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


def only(value: Any) -> Schema:
    """Describes one value member by member, because generators cannot write enums of objects and arrays."""
    if isinstance(value, dict):
        members = {name: only(member) for name, member in value.items()}
        return {"type": "object", "required": list(members), "properties": members, "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": enum_of(value) if value else {}, **_exactly(len(value))}
    return const_of(value)


def _exactly(length: int) -> Schema:
    return {"minItems": length, "maxItems": length}


def one_of(schemas: Sequence[Schema]) -> Schema:
    """A single schema needs no ``oneOf``."""
    return schemas[0] if len(schemas) == 1 else {"oneOf": list(schemas)}


def with_types(schema: Schema) -> Schema:
    """Adds the types of enums to a schema of msgspec, which leaves them out. Changes the schema in place."""
    if "enum" in schema and "type" not in schema:
        schema["type"] = enum_of(schema["enum"])["type"]
    lists = [schema["items"]] if isinstance(schema.get("items"), dict) else []
    for inner in (*schema.get("anyOf", ()), *schema.get("properties", {}).values(), *lists):
        with_types(inner)
    return schema
