"""A YAML file checked against types; every complaint says the line, the key and the nearest valid name."""

from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.domain.nearest import LONGEST_NAME, nearest
from app.files.document import Document, DocumentError, KeyPath, Lines, read_document
from app.files.words import words_of

Location = tuple[str | int, ...]
Spec = TypeVar("Spec", bound=BaseModel)

_MOST_ERRORS = 32


class ConfigError(Exception):
    """A file cannot be used; the message has a line for each complaint."""


def read_spec(path: Path, spec: type[Spec]) -> tuple[Spec, Lines]:
    """The values of a file, and the line of each key. Raises ConfigError."""
    document = _document(path)
    try:
        return spec.model_validate(document.values), document.lines
    except ValidationError as exc:
        raise ConfigError(_all_complaints(path, spec, document.lines, exc)) from exc


def complaint_at(path: Path, lines: Lines, location: Location, text: str) -> str:
    known = _known_part(lines, location)
    where = ".".join(str(part)[:LONGEST_NAME] for part in location) or "the file"
    return f"{path}:{lines.get(_text(known), 1)}: {where} {text}"


def _document(path: Path) -> Document:
    """Raises ConfigError."""
    try:
        return read_document(path)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    except DocumentError as exc:
        raise ConfigError(f"{path}:{exc.line}: {exc}") from exc


def _all_complaints(path: Path, spec: type[BaseModel], lines: Lines, exc: ValidationError) -> str:
    """Returns one line for each invalid value, regardless of the number of types tried, up to a limit."""
    complaints = dict.fromkeys(_complaint_of(path, spec, lines, error) for error in exc.errors()[:_MOST_ERRORS])
    more = exc.error_count() - _MOST_ERRORS
    return "\n".join([*complaints, *([f"{path}: and {more} more"] if more > 0 else [])])


def _complaint_of(path: Path, spec: type[BaseModel], lines: Lines, error: ErrorDetails) -> str:
    location = tuple(part for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        text = "is not a known key" + nearest(str(location[-1])[:LONGEST_NAME], _keys_at(spec, location[:-1]))
    else:
        text = f"is wrong: {words_of(error)}"
        if error["type"] != "missing":
            location = _known_part(lines, location)
    return complaint_at(path, lines, location, text)


def _known_part(lines: Lines, location: Location) -> Location:
    """Returns the part of a location that is in the file. After it, pydantic adds the types that it tried."""
    return next((location[:n] for n in range(len(location), 0, -1) if _text(location[:n]) in lines), ())


def _text(location: Location) -> KeyPath:
    return tuple(map(str, location))


def _keys_at(spec: type[BaseModel], location: Location) -> list[str]:
    """The keys that the section at ``location`` may have."""
    section: Any = spec
    for part in location:
        section = _section_under(section, part)
    return list(section.model_fields) if section is not None else []


def _section_under(section: Any, part: str | int) -> Any:
    """Returns the model class of the value of ``part``; for a mapping or a list, the class of its values."""
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
