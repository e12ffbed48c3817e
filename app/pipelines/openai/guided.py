"""Guided decoding: the fields of a pipeline that hold the model's answer to a JSON schema, and the schema of calls."""

from collections.abc import Mapping
from typing import Any

from app.core.json import json_of
from app.pipelines.openai.mapping import TextForm
from app.pipelines.openai.tool_calls.parser import Tools

_DEFINITIONS = ("$defs", "definitions")


def guided_fields(form: TextForm, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the pipeline's fields by name; empty if the model cannot be guided."""
    guided = form.guided
    if guided is None:
        return {}
    value = json_of(schema).decode() if guided.member is None else {guided.member: schema}
    return {guided.parameter: value, **guided.also}


def calls_schema(tools: Tools, *, is_parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls: ``[{"name": ..., "parameters": {...}}]``.

    Raises ValueError if two functions define different types under one name.
    """
    definitions: dict[str, dict[str, Any]] = {}
    options = [_call_schema(name, schema, definitions) for name, schema in tools.items()]
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": options}, **definitions}
    return calls if is_parallel else {**calls, "maxItems": 1}


def _call_schema(name: str, parameters: Mapping[str, Any], definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """References begin at the whole schema, so the definitions of a function move there. Raises ValueError."""
    own = {"type": "object"} | {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
    for key in _DEFINITIONS:
        given = parameters.get(key)
        for type_, schema in given.items() if isinstance(given, dict) else ():
            if definitions.setdefault(key, {}).setdefault(type_, schema) != schema:
                raise ValueError("define different types under one name")
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": own},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
