"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

A value is text; the schema of the function says which values are not. Source: the model's chat template.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from app.core.json import json_of
from app.pipelines.openai.tool_calls.parser import MAX_HELD, Markers, Parser, Steps

_BEGINNING, _END = Markers.of("<tool_call>"), "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_END = Markers.of("\n" + _PARAMETER_END, _PARAMETER_END)
_TEXTS = ({"string"}, set[str]())
"""The types of a value that is always a text."""


class Qwen3CoderParser(Parser):
    def _run(self) -> Steps[None]:
        while before := (yield from self._until(_BEGINNING)):
            before += yield from self._white()
            before += (begun := (yield from self._starts(_FUNCTION)))
            name = (yield from self._find(">", 65)) if begun else None
            if name is None or name not in self._tools:
                self._give("text", before)
                continue
            self._take(len(name) + 1)
            schema = self._tools[name]
            self._give("call", name)
            rest = yield from self._arguments(schema)
            rest += yield from self._white()
            if not (yield from self._starts(_END)):
                self._give("text", rest)

    def _arguments(self, schema: Mapping[str, Any]) -> Steps[str]:
        """Ends after the function's end, or after what is no parameter, which is returned."""
        between = "{"
        while True:
            space = yield from self._white()
            found = yield from self._starts(_PARAMETER, _FUNCTION_END)
            key = (yield from self._find(">", 257)) if found == _PARAMETER else None
            if key is None:
                self._give("arguments", "{}" if between == "{" else "}")
                return "" if found == _FUNCTION_END else space + found
            self._take(len(key) + 1)
            self._give("arguments", between + json_of(key).decode() + ":")
            yield from self._starts("\n")
            if not (yield from self._value(_types_of(schema, key))):
                return ""
            between = ","

    def _value(self, types: set[str]) -> Steps[bool]:
        """Returns whether the value has an end. One that may be another type than a text is held until its end."""
        if types not in _TEXTS:
            value = yield from self._find(_PARAMETER_END, MAX_HELD)
            if value is not None:
                self._take(len(value) + len(_PARAMETER_END))
                self._give("arguments", _json_value(value.removesuffix("\n"), types))
                return True
        self._give("arguments", '"')
        if not (yield from self._until(_VALUE_END, "arguments", _in_string)):
            return False
        self._give("arguments", '"')
        return True


def _types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types that a parameter may have; empty if its schema does not say."""
    properties = schema.get("properties")
    of_key = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(of_key, dict):
        return set()
    options = [of_key, *(each for name in ("anyOf", "oneOf") for each in _list(of_key.get(name)))]
    types = [each.get("type") for each in options if isinstance(each, dict)]
    return {name for each in types for name in (each if isinstance(each, list) else [each]) if isinstance(name, str)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _json_value(text: str, types: set[str]) -> str:
    """A text that is no JSON of one of the types is a string. Python's words for true, false and none are read too."""
    words = {"true": "true", "false": "false", "none": "null", "null": "null"}
    written = words.get(text.strip().lower(), text)
    try:
        value = msgspec.json.decode(written)
        return json_of(text if isinstance(value, str) and "string" in types else value).decode()
    except (ValueError, TypeError, RecursionError):
        return json_of(text).decode()


def _in_string(text: str) -> str:
    return json_of(text).decode()[1:-1]
