"""Limits a caller's JSON schema, and counts the steps of a check before it runs.

The schema is hostile input. Its references stay inside it. A check applies parts of the schema to each value of the
answer, and a part may be applied many times, because references can name it many times: two references in each of 30
definitions are 2**30 applications. So the applications are counted for each depth of the answer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 40_000_000
"""Limit of the work for one answer: about 0.5 s of a thread."""
_STEPS_OF_PATTERN = 2000
"""Steps for each character: what the slowest patterns of 64 KiB take."""
_REQUEST_DEPTHS = 3
"""Depths of the answer for which a schema must be within the limit before there is an answer."""
_MAX_COUNTED = 100_000
"""Limit of the parts of the schema that are counted, each for each depth."""
_DATA = ("enum", "const", "default", "examples")
_DEFINITIONS = ("$defs", "definitions")
_MAPS_HERE = ("dependentSchemas", "dependencies")
_MAPS_BELOW = ("properties", "patternProperties")
_BELOW = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "propertyNames")
_REFUSED = frozenset(
    {"$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
    | {"unevaluatedProperties", "unevaluatedItems"}
)
"""Keywords that give a reference another meaning than a path, and those that check parts a second time."""


class SchemaCost:
    """The steps of a check with one schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raises ValueError with what is wrong with the schema."""
        check_references(schema)
        self._values = _Applications(schema, _own_values, lambda _: 0)
        self._patterns = _Applications(schema, _own_patterns, _patterns_of_names)
        if any(self._values.at(depth) > MAX_STEPS for depth in range(_REQUEST_DEPTHS)):
            raise ValueError("takes too many steps to check")

    def steps_of(self, answer: Any) -> int | None:
        """Returns the steps for a decoded answer without those of patterns; None if there are too many steps."""
        steps = pattern_steps = 0
        try:
            for depth, (values, characters) in enumerate(_levels_of(answer)):
                steps += values * self._values.at(depth)
                pattern_steps += characters * _STEPS_OF_PATTERN * self._patterns.at(depth)
                if steps + pattern_steps > MAX_STEPS:
                    return None
        except ValueError:
            return None
        return steps


def check_references(schema: Mapping[str, Any]) -> None:
    """Every reference names a part of the schema. Raises ValueError."""
    for part in _objects_of(schema):
        refused = next((name for name in part if name in _REFUSED and not isinstance(part[name], dict)), None)
        if refused is not None:
            raise ValueError(f"must not have {refused}")
        if isinstance(part.get("$ref"), str):
            _named(schema, part["$ref"])


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


def _objects_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yields the objects in a value, but those in data."""
    if isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name not in _DATA or isinstance(inner, dict):
                yield from _objects_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects_of(inner)


class _Applications:
    """How often parts of the schema are applied to one value at a depth of the answer.

    ``own``: what one part counts itself. ``below``: what it counts for each name of a member, one level deeper.
    """

    def __init__(
        self,
        root: Mapping[str, Any],
        own: Callable[[Mapping[str, Any]], int],
        below: Callable[[Mapping[str, Any]], int],
    ) -> None:
        self._root = root
        self._own = own
        self._below = below
        self._count_by_part: dict[tuple[int, int], int | None] = {}
        """None while the part is being counted."""

    def at(self, depth: int) -> int:
        """Depths must be asked for in order. Raises ValueError."""
        try:
            return self._at(self._root, depth)
        except RecursionError as exc:
            raise ValueError("has too many references that lead to each other") from exc

    def _at(self, part: Any, depth: int) -> int:
        if depth < 0 or not isinstance(part, dict):
            return 0
        key = (id(part), depth)
        if key not in self._count_by_part:
            if len(self._count_by_part) == _MAX_COUNTED:
                raise ValueError("has too many parts to be checked")
            self._count_by_part[key] = None
            own = self._own(part) if depth == 0 else self._below(part) if depth == 1 else 0
            self._count_by_part[key] = min(own + self._inner(part, depth), MAX_STEPS + 1)
        count = self._count_by_part[key]
        if count is None:
            raise ValueError("has a reference that leads to itself for the same value")
        return count

    def _inner(self, part: Mapping[str, Any], depth: int) -> int:
        count = 0
        for name, inner in part.items():
            if name in _DATA or name in _DEFINITIONS:
                continue
            if name == "$ref" and isinstance(inner, str):
                count += self._at(_named(self._root, inner), depth)
            elif name == "properties":  # a member has one name
                count += max((self._at(each, depth - 1) for each in _parts_in(inner)), default=0)
            elif name in _MAPS_BELOW or name in _MAPS_HERE:
                count += sum(self._at(each, depth - (name in _MAPS_BELOW)) for each in _parts_in(inner))
            else:
                parts = inner if isinstance(inner, list) else [inner]
                count += sum(self._at(each, depth - (name in _BELOW)) for each in parts)
        return count


def _parts_in(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else ()


def _own_values(part: Mapping[str, Any]) -> int:
    """The keywords, and the values of data and of lists such as ``required``."""
    return 1 + sum(_size(value) if name in _DATA or isinstance(value, list) else 1 for name, value in part.items())


def _size(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, inner))


def _own_patterns(part: Mapping[str, Any]) -> int:
    return int(isinstance(part.get("pattern"), str))


def _patterns_of_names(part: Mapping[str, Any]) -> int:
    named = part.get("patternProperties")
    return len(named) if isinstance(named, dict) else 0


def _levels_of(answer: Any) -> Iterator[tuple[int, int]]:
    """Yields, for each depth of the answer, the number of its values and that of characters in texts and names."""
    level, names = [answer], 0
    while level:
        yield len(level), names + sum(len(each) for each in level if isinstance(each, str))
        objects = [each for each in level if isinstance(each, dict)]
        lists = [each for each in level if isinstance(each, list)]
        names = sum(len(name) for each in objects for name in each)
        level = [inner for each in objects for inner in each.values()] + [inner for each in lists for inner in each]
