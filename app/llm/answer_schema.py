"""Checks a model's answer against a caller's JSON schema, of the draft 2020-12, with patterns of linear time.

The schema is hostile input, and neither compiling it nor a check can be stopped: other threads wait for both. So the
schema is limited, and the steps of a check are counted before it runs. Two references in each of 30 definitions are
2**30 applications of one part.

``format`` is not checked. Source: https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator

CAN_CHECK = find_spec("jsonschema_rs") is not None
"""Whether the extra ``jsonschema-rs`` is installed."""
MAX_PATTERNS = 64
MAX_PATTERN_CHARACTERS = 8192
"""Limit of all patterns of a schema. The slowest take 1.5 us a character to compile."""
_PATTERN_STEPS = ((8 * 1024, 100), (64 * 1024, 500))
"""Limit of the memory of a compiled pattern -> the steps for a character of a text, tried in this order."""
MAX_ANSWER_CHARACTERS = 1024 * 1024
MAX_STEPS = 2_000_000
"""Limit of the work for one answer: about 0.1 s."""
_PART_STEPS = 10
"""Steps for a part of the schema that is applied to a value, without its data."""
_MAX_COUNTED = 20_000
"""Limit of the parts that are counted, each for the values of one place."""
_MAX_EXPLAINED_STEPS = 10_000
"""A message takes up to 0.1 ms for each part, because each branch of an ``anyOf`` has errors of its own."""
_FRACTION_STEPS = 500
"""Steps for a ``multipleOf`` that is not an integer, which the check takes as an exact fraction."""
_NESTED_STEPS = 20
"""Steps for a value inside the data of a schema, or inside an item that must be unique."""
_CHARACTERS_PER_STEP = 1024
"""For the length of a text."""
_KEPT_SCHEMAS = 8
"""Each takes up to 4 MiB."""
TOO_LARGE = "is too large to be checked"
_DATA = ("enum", "const", "default", "examples")
_REFUSED = frozenset(
    {"$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
    | {"unevaluatedProperties", "unevaluatedItems"}
)
"""Keywords that give a reference another meaning than a path, and those that check parts a second time."""


class AnswerSchema:
    validator: "Draft202012Validator | None" = None
    """None if the answer only has to be an object."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        """``schema``: None accepts any object.

        Raises ValueError with what is wrong with the schema. A schema needs the extra ``jsonschema-rs``.
        """
        self._schema = schema or {}
        self._character_steps = 0
        if schema is None:
            return
        from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError  # noqa: PLC0415 - an extra

        parts = check_references(schema)
        patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
        patterns += [pattern for part in parts for pattern in dict_in(part.get("patternProperties"))]
        if len(patterns) > MAX_PATTERNS:
            raise ValueError(f"has more than {MAX_PATTERNS} patterns")
        if sum(map(len, patterns)) > MAX_PATTERN_CHARACTERS:
            raise ValueError(f"has more than {MAX_PATTERN_CHARACTERS} characters in patterns")
        steps, no_value = _Steps(schema), [None]
        try:
            for part in parts:
                steps.count(part, no_value)
        except RecursionError as exc:
            raise ValueError("has too many references that lead to each other") from exc
        own = {name: value for name, value in schema.items() if name != "$schema"}
        problem = ""
        for size, self._character_steps in _PATTERN_STEPS:
            options = RegexOptions(size_limit=size, dfa_size_limit=size)
            try:
                self.validator = Draft202012Validator(
                    own, pattern_options=options, validate_formats=False, offline=True
                )
            except ValidationError as exc:
                problem = exc.message
            else:
                return
        raise ValueError(f"is not a JSON schema that can be checked: {problem}")

    def problem_of(self, text: str) -> str | None:
        """Returns what is wrong with the answer; None for nothing. Takes up to about 0.2 s."""
        if len(text) > MAX_ANSWER_CHARACTERS:
            return TOO_LARGE
        try:
            value = msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return "is not JSON"
        if self.validator is None:
            return None if isinstance(value, dict) else "is not an object"
        try:
            steps = _Steps(self._schema, self._character_steps).count(self._schema, [value])
            if self.validator.is_valid(value):
                return None
            error = next(self.validator.iter_errors(value)) if steps <= _MAX_EXPLAINED_STEPS else None
        except (ValueError, RecursionError):  # too many steps, or the value is nested too deeply
            return TOO_LARGE
        problem = "does not fit the schema"
        if error is not None:
            at = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
            problem += f" at {at.removeprefix('.') or 'its root'}: {error.message}"
        return problem


@lru_cache(_KEPT_SCHEMAS)
def answer_schema_of(schema: bytes) -> AnswerSchema:
    """``schema``: as JSON. Compiles it once while it is used. Raises ValueError."""
    return AnswerSchema(msgspec.json.decode(schema))


def check_references(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Every reference names a part of the schema. Returns all parts, without those in data. Raises ValueError."""
    parts: list[Mapping[str, Any]] = []
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            parts.append(part)
            todo += [inner for name, inner in part.items() if name not in _DATA or isinstance(inner, dict)]
            refused = next((name for name in part if name in _REFUSED and not isinstance(part[name], dict)), None)
            if refused is not None:
                raise ValueError(f"must not have {refused}")
            if isinstance(part.get("$ref"), str):
                _named(schema, part["$ref"])
    return parts


_MEMBERS, _NAMES, _ITEMS = -1, -2, -3
_PLACES = {"additionalProperties": _MEMBERS, "propertyNames": _NAMES, "items": _ITEMS, "contains": _ITEMS}
"""Keyword -> all values one level deeper to which its part is applied."""


class _Steps:
    """Counts the steps of one check: each part of the schema for each value to which the check may apply it."""

    def __init__(self, schema: Mapping[str, Any], character_steps: int = 0) -> None:
        """``character_steps``: for each pattern and each character of a text."""
        self._schema = schema
        self._character_steps = character_steps
        self._known: dict[tuple[int, int], int | None] = {}
        """By part and values. None while they are being counted."""
        self._known_below: dict[int, dict[str | int, list[Any]]] = {}

    def count(self, part: Any, values: Sequence[Any]) -> int:
        """``values``: all to which the part is applied at one place.

        Raises ValueError if there are too many steps, and RecursionError.
        """
        if not isinstance(part, dict) or not values:
            return 0
        key = id(part), id(values)
        if key not in self._known:
            if len(self._known) == _MAX_COUNTED:
                raise ValueError("has too many parts to be checked")
            self._known[key] = None
            steps = self._own_steps(part, values)
            applied = self._applied(part, values)
            while steps <= MAX_STEPS and (found := next(applied, None)) is not None:
                steps += self.count(*found)
            if steps > MAX_STEPS:
                raise ValueError("takes too many steps to check")
            self._known[key] = steps
        known = self._known[key]
        if known is None:
            raise ValueError("has a reference that leads to itself for the same value")
        return known

    def _own_steps(self, part: Mapping[str, Any], values: Sequence[Any]) -> int:
        """The steps for what one part has itself: its data, and characters and items that it compares."""
        data = [each for name in ("enum", "required", "type") for each in list_in(part.get(name))]
        data += [part.get(name) for name in ("const", "dependentRequired", "dependencies")]
        each_value = _PART_STEPS + (_FRACTION_STEPS if isinstance(part.get("multipleOf"), float) else 0)
        each_value += sum(_NESTED_STEPS * _size(each) if isinstance(each, dict | list | float) else 1 for each in data)
        texts = sum(len(each) for each in values if isinstance(each, str))
        steps = len(values) * each_value
        steps += self._character_steps * texts if "pattern" in part else texts // _CHARACTERS_PER_STEP
        if "patternProperties" in part:
            names = sum(map(len, self._below(values).get(_NAMES, ())))
            steps += self._character_steps * names * len(dict_in(part["patternProperties"]))
        if "uniqueItems" in part:
            steps += _NESTED_STEPS * sum(_size(each) for each in values if isinstance(each, list))
        return steps

    def _applied(self, part: Mapping[str, Any], values: Sequence[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yields the parts inside a part, each with the values to which the check may apply it."""
        if isinstance(part.get("$ref"), str):
            yield _named(self._schema, part["$ref"]), values
        yield from ((part.get(name), values) for name in ("not", "if", "then", "else"))
        yield from ((each, values) for name in ("allOf", "anyOf", "oneOf") for each in list_in(part.get(name)))
        named = (dict_in(part.get(name)) for name in ("dependentSchemas", "dependencies"))
        yield from ((each, values) for parts in named for each in parts.values())
        properties, below = dict_in(part.get("properties")), self._below(values)
        yield from ((properties[name], below[name]) for name in properties.keys() & below.keys())
        yield from ((each, below.get(index, ())) for index, each in enumerate(list_in(part.get("prefixItems"))))
        yield from ((each, below.get(_MEMBERS, ())) for each in dict_in(part.get("patternProperties")).values())
        yield from ((part.get(keyword), below.get(place, ())) for keyword, place in _PLACES.items())

    def _below(self, values: Sequence[Any]) -> Mapping[str | int, Sequence[Any]]:
        """Returns the values one level deeper, by name, index or place. Equal ones are the same list."""
        below = self._known_below.get(id(values))
        if below is None:
            below = self._known_below[id(values)] = defaultdict(list)
            for each in values:
                pairs: Iterable[tuple[str | int, Any]] = ()
                if isinstance(each, dict):
                    below[_MEMBERS] += each.values()
                    below[_NAMES] += each
                    pairs = each.items()
                elif isinstance(each, list):
                    below[_ITEMS] += each
                    pairs = enumerate(each[:_MAX_COUNTED])
                for name, inner in pairs:
                    below[name].append(inner)
        return below


def _size(value: Any) -> int:
    """The number of values in a value, with the value itself. A fraction counts as five."""
    if isinstance(value, float):
        return 5
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, inner))


def _named(root: Mapping[str, Any], reference: str) -> Any:
    """Returns what a reference names. Raises ValueError."""
    if not reference.startswith("#"):
        raise ValueError("must refer only to itself: a $ref begins with #")
    value: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (LookupError, TypeError, ValueError) as exc:
            raise ValueError("has a reference to something that it does not have") from exc
    return value


def dict_in(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def list_in(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
