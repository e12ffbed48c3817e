"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

A value is text; the schema of the function says which values are not. Source: the model's chat template.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from app.core.json import json_of
from app.pipelines.openai.tool_calls.parser import MAX_HELD, Parser, Steps

_BEGINNING, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s{0,8}<function=([^<>\s]{1,64})>")
_PARAMETER = re.compile(r"\s{0,8}<parameter=([^<>]{1,256})>")
_FUNCTION_END = re.compile(r"\s{0,8}</function>")
_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_TEXTS = ({"string"}, set[str]())
"""The types of a value that is always a text."""


class Qwen3CoderParser(Parser):
    def _run(self) -> Steps[None]:
        while before := (yield from self._until(_BEGINNING)):
            found = yield from self._head(_FUNCTION, 96, partial(_may_be, "<function="))
            if found is None or found[1] not in self._tools:
                self._give("text", before)
                continue
            self._take(found.end())
            self._give("call", found[1])
            yield from self._arguments(self._tools[found[1]])
            space = yield from self._white()
            if not (yield from self._starts(_END)):
                self._give("text", space)

    def _arguments(self, schema: Mapping[str, Any]) -> Steps[None]:
        """Ends after the function's end, or before what is no parameter."""
        between = "{"
        while found := (yield from self._head(_PARAMETER, 320, partial(_may_be, "<parameter="))):
            self._take(found.end())
            self._give("arguments", between + json_of(found[1]).decode() + ":")
            yield from self._starts("\n")
            if not (yield from self._value(_types_of(schema, found[1]))):
                return
            between = ","
        self._give("arguments", "{}" if between == "{" else "}")
        end = yield from self._head(_FUNCTION_END, 32, partial(_may_be, "</function>"))
        self._take(end.end() if end else 0)

    def _value(self, types: set[str]) -> Steps[bool]:
        """Returns whether the value has an end."""
        if types not in _TEXTS:
            value = yield from self._held_value()
            if value is not None:
                self._give("arguments", _json_value(value, types))
                return True
        self._give("arguments", '"')
        if not (yield from self._until(*_VALUE_ENDS, kind="arguments", as_written=_in_string)):
            return False
        self._give("arguments", '"')
        return True

    def _held_value(self) -> Steps[str | None]:
        """Takes a value with its end; None if it has none within MAX_HELD."""
        place = 0
        while True:
            index = self._text.find("</parameter>", place, MAX_HELD)
            if index >= 0:
                value = self._take(index + len("</parameter>"))
                return value[:index].removesuffix("\n")
            place = max(len(self._text) - len("</parameter>"), 0)
            if not (yield from self._more()):
                return None


def _may_be(literal: str, text: str) -> bool:
    """Whether a text begins with the literal, or may do so when it grows."""
    bare = text.lstrip()
    return bare.startswith(literal) or literal.startswith(bare)


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
