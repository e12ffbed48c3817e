"""``gateway.yaml`` read and checked; every complaint says the line, the key and the nearest valid name."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.pipelines.spec import GatewaySpec

Location = tuple[str | int, ...]

Lines = dict[tuple[str, ...], int]
"""The line of each key; a list's items count as keys, and every key as the text that stands in the file."""

_MOST_LISTED = 12


class ConfigError(Exception):
    """The file cannot be used; the message has a line for each complaint."""


@dataclass(frozen=True, slots=True)
class GatewayFile:
    """A checked file: what it says, where each key stands, and the folder that its paths are relative to."""

    path: Path
    spec: GatewaySpec
    lines: Lines

    def complaint(self, location: Location, text: str) -> str:
        return _complaint(self.path, self.lines, location, text)


def read_gateway_file(path: Path) -> GatewayFile:
    """Raises ConfigError."""
    node, values = _parsed(path)
    try:
        lines = dict(_lines_of(node, ()))
    except RecursionError as exc:
        raise ConfigError(f"{path}: an alias holds itself") from exc
    if twice := _keys_used_twice(node, ()):
        raise ConfigError("\n".join(_complaint(path, {loc: line}, loc, "is used twice") for loc, line in twice))
    try:
        spec = GatewaySpec.model_validate(values)
    except ValidationError as exc:
        complaints = dict.fromkeys(_complaint_of(path, lines, error) for error in exc.errors())
        raise ConfigError("\n".join(complaints)) from exc
    return GatewayFile(path, spec, lines)


def _parsed(path: Path) -> tuple[yaml.Node | None, Any]:
    """The file as nodes, which know their lines, and as values. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        return yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def nearest(name: str, valid: Sequence[str]) -> str:
    """``; did you mean 'x'?`` or the valid names, to end a sentence with."""
    found = difflib.get_close_matches(name, valid, n=1)
    if found:
        return f"; did you mean '{found[0]}'?"
    listed = sorted(valid)[:_MOST_LISTED] + ["..."] * (len(valid) > _MOST_LISTED)
    return f"; valid here: {', '.join(listed)}" if valid else ""


def _complaint(path: Path, lines: Lines, location: Location, text: str) -> str:
    known = _known_part(lines, location)
    where = ".".join(str(part) for part in location) or "the file"
    return f"{path}:{lines.get(_text(known), 1)}: {where} {text}"


def _complaint_of(path: Path, lines: Lines, error: ErrorDetails) -> str:
    location = tuple(part for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        text = "is not a known key" + nearest(str(location[-1]), _keys_at(location[:-1]))
    else:
        text = f"is wrong: {error['msg'].removeprefix('Value error, ')}"
        if error["type"] != "missing":
            location = _known_part(lines, location)
    return _complaint(path, lines, location, text)


def _known_part(lines: Lines, location: Location) -> Location:
    """The longest part of a location that stands in the file: behind it, pydantic names the types that it tried."""
    return next((location[:n] for n in range(len(location), 0, -1) if _text(location[:n]) in lines), ())


def _text(location: Location) -> tuple[str, ...]:
    return tuple(map(str, location))


def _keys_at(location: Location) -> list[str]:
    """The keys that the section at ``location`` may have."""
    section: Any = GatewaySpec
    for part in location:
        section = _section_under(section, part)
    return list(section.model_fields) if section is not None else []


def _section_under(section: Any, part: str | int) -> Any:
    """The model class of what stands under ``part``; a mapping's or a list's key leads to the class of its values."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        field = section.model_fields.get(str(part))
        return _class_in(field.annotation) if field else None
    return section[0] if isinstance(section, list) else None


def _class_in(annotation: Any) -> Any:
    """``X`` or ``X | None`` -> X; ``dict[_, X]`` and ``list[X]`` -> [X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return [inner] if getattr(annotation, "__origin__", None) in (dict, list) else inner
        if found := _class_in(inner):
            return found
    return None


def _lines_of(node: yaml.Node | None, location: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if node is None:
        return
    if not location:
        yield (), node.start_mark.line + 1
    for key, key_node, child in _children(node):
        yield (*location, key), key_node.start_mark.line + 1
        yield from _lines_of(child, (*location, key))


def _children(node: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, child in node.value:
            yield str(key_node.value), key_node, child
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield str(index), child, child


def _keys_used_twice(node: yaml.Node | None, location: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    twice: list[tuple[tuple[str, ...], int]] = []
    seen: set[str] = set()
    for key, key_node, child in _children(node) if node else ():
        if key in seen:
            twice.append(((*location, key), key_node.start_mark.line + 1))
        seen.add(key)
        twice += _keys_used_twice(child, (*location, key))
    return twice
