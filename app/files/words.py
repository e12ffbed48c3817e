"""Translates pydantic's errors about values of files and settings to plain words."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from app.domain.nearest import nearest

_Context = Mapping[str, Any]
_WORDS: dict[str, Callable[[_Context], str]] = {
    "missing": lambda _: "a value is required",
    "string_type": lambda _: "must be text",
    "int_type": lambda _: "must be a whole number",
    "int_parsing": lambda _: "must be a whole number",
    "int_from_float": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "float_parsing": lambda _: "must be a number",
    "finite_number": lambda _: "must be a finite number",
    "bool_type": lambda _: "must be true or false",
    "bool_parsing": lambda _: "must be true or false",
    "list_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be a mapping of keys to values",
    "model_type": lambda _: "must be a mapping of keys to values",
    "greater_than": lambda context: f"must be above {context['gt']:g}",
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "less_than": lambda context: f"must be below {context['lt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "timezone_aware": lambda _: "must have a time zone, such as 2027-01-01T00:00:00Z",
    "too_short": lambda context: f"must have at least {context['min_length']} entry",
    "too_long": lambda context: f"must have at most {context['max_length']} entries",
    "string_too_short": lambda context: f"must have at least {context['min_length']} characters",
    "string_pattern_mismatch": lambda context: f"must match the pattern {context['pattern']}",
}


def words_of(error: ErrorDetails) -> str:
    """The end of a sentence about the value."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", context["expected"])
        return f"not an allowed value{nearest(str(error['input']), valid)}"
    words = _WORDS.get(kind)
    return error["msg"].removeprefix("Value error, ") if words is None else words(context)
