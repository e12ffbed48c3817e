"""``gateway.yaml`` read and checked; every complaint says the line, the key and the nearest valid name."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.pipelines.document import Document, DocumentError, KeyPath, Lines, read_document, read_regular_file
from app.pipelines.spec import GatewaySpec, PipelineSpec

Location = tuple[str | int, ...]

MAX_TEMPLATE_BYTES = 64 * 1024

_MOST_LISTED = 12
_MOST_ERRORS = 32
_LONGEST_KEY = 128


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
    document = _document(path)
    try:
        spec = GatewaySpec.model_validate(document.values)
    except ValidationError as exc:
        raise ConfigError(_all_complaints(path, document.lines, exc)) from exc
    return _with_templates(GatewayFile(path, spec, document.lines))


def _with_templates(file: GatewayFile) -> GatewayFile:
    """The file with the text of every template that it names. Raises ConfigError."""
    pipelines = {name: _with_template(file, name, pipeline) for name, pipeline in file.spec.pipelines.items()}
    return replace(file, spec=file.spec.model_copy(update={"pipelines": pipelines}))


def _with_template(file: GatewayFile, name: str, pipeline: PipelineSpec) -> PipelineSpec:
    """The text becomes a part of the pipeline's words: another text is another form of the pipeline."""
    openai = pipeline.openai
    if openai is None or openai.chat is None or openai.chat.template is None:
        return pipeline
    try:
        text = read_regular_file(file.path.parent / openai.chat.template, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, ValueError) as exc:
        location = ("pipelines", name, "openai", "chat", "template")
        raise ConfigError(file.complaint(location, f"cannot be read: {exc}")) from exc
    chat = openai.chat.model_copy(update={"template_text": text})
    return pipeline.model_copy(update={"openai": openai.model_copy(update={"chat": chat})})


def _document(path: Path) -> Document:
    """Raises ConfigError."""
    try:
        return read_document(path)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    except DocumentError as exc:
        raise ConfigError(f"{path}:{exc.line}: {exc}") from exc


def nearest(name: str, valid: Sequence[str]) -> str:
    """``; did you mean 'x'?`` or the valid names, to end a sentence with.

    ``name``: of any length. For a name of 2 MB difflib alone needs 72 MB and up to 6 s.
    """
    found = difflib.get_close_matches(name[:_LONGEST_KEY], valid, n=1)
    if found:
        return f"; did you mean '{found[0]}'?"
    listed = sorted(valid)[:_MOST_LISTED] + ["..."] * (len(valid) > _MOST_LISTED)
    return f"; valid here: {', '.join(listed)}" if valid else ""


def _all_complaints(path: Path, lines: Lines, exc: ValidationError) -> str:
    """A line for each wrong value, however many types were tried for it; at most so many lines."""
    complaints = dict.fromkeys(_complaint_of(path, lines, error) for error in exc.errors()[:_MOST_ERRORS])
    more = exc.error_count() - _MOST_ERRORS
    return "\n".join([*complaints, *([f"{path}: and {more} more"] if more > 0 else [])])


def _complaint(path: Path, lines: Lines, location: Location, text: str) -> str:
    known = _known_part(lines, location)
    where = ".".join(str(part)[:_LONGEST_KEY] for part in location) or "the file"
    return f"{path}:{lines.get(_text(known), 1)}: {where} {text}"


def _complaint_of(path: Path, lines: Lines, error: ErrorDetails) -> str:
    location = tuple(part for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        text = "is not a known key" + nearest(str(location[-1])[:_LONGEST_KEY], _keys_at(location[:-1]))
    else:
        text = f"is wrong: {error['msg'].removeprefix('Value error, ')}"
        if error["type"] != "missing":
            location = _known_part(lines, location)
    return _complaint(path, lines, location, text)


def _known_part(lines: Lines, location: Location) -> Location:
    """The longest part of a location that stands in the file: behind it, pydantic names the types that it tried."""
    return next((location[:n] for n in range(len(location), 0, -1) if _text(location[:n]) in lines), ())


def _text(location: Location) -> KeyPath:
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
