"""Decodes a request's body to its fields.

A small body is decoded in one pass with a type compiled for the pipeline, without Python code for each value. If
this fails, and for every large body, the body is read member by member, which limits the memory
(``app.codecs.json_scan``) and reports every problem. Both methods accept the same bodies.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from app.codecs.json_scan import check_depth, is_json, malformed, members_of
from app.codecs.kinds import check_image
from app.core.errors import FieldProblem, InvalidInput, InvalidJson
from app.core.text import nearest, shown
from app.pipelines.fields import Field, InputField

LARGE_BYTES = 64 * 1024
"""Bodies of at least this size are read member by member, in a thread, because this would block the event loop."""
MAX_PROBLEMS = 8
_NO_TEXT = "is not UTF-8 text"
_BYTE = re.compile(r"\(byte (\d+)\)")
_NULL = re.compile(rb"[ \t\n\r]*null[ \t\n\r]*")
_WORDS_BY_TYPE = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
"""msgspec's names of types -> JSON's, with their articles."""
_TYPE_NAME = re.compile(rf"\b({'|'.join(_WORDS_BY_TYPE)})\b")
_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`\Z")

Body = bytes | bytearray | memoryview


class FilePart(bytes):
    """The content of a form's part that has a file name."""


File = str | bytes | memoryview
"""A memoryview is a raw body."""
Part = File | list[bytes]
"""The value of one field of a form; a list for several files."""


class BodyReader:
    def __init__(self, name: str, fields: Mapping[str, Field]) -> None:
        self._fields = fields
        self._quoted_names = [f'"{name}"'.encode() for name in self._fields]
        self._nulls = {each.name for each in fields.values() if isinstance(each, InputField) and each.is_null_a_value}
        """The fields for which ``null`` is a value. For all others it means absent."""
        self._takes_any_json = any(field.json_type is msgspec.Raw for field in fields.values())
        types: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for index, field in enumerate(fields.values()):
            if field.is_required:
                types.append((f"field_{index}", field.json_type))
            else:
                absent = msgspec.UnsetType if field.json_type is msgspec.Raw else None | msgspec.UnsetType
                types.append((f"field_{index}", field.json_type | absent, msgspec.UNSET))
        names = {f"field_{index}": name for index, name in enumerate(fields)}
        self.struct = msgspec.defstruct(name, types, rename=names, forbid_unknown_fields=True, kw_only=True)
        self._decoder = msgspec.json.Decoder(self.struct)

    def from_json(self, body: Body, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """``given``: values of further fields, which the body does not have.

        Raises InvalidJson, InvalidRequest or InvalidInput.
        """
        if not body:
            needed = " and ".join(f"'{name}'" for name, field in self._fields.items() if field.is_required)
            raise InvalidJson(f"The body is empty. Send a JSON object{f' with {needed}' if needed else ''}.")
        if len(body) >= LARGE_BYTES:
            return self._decoded_by_member(memoryview(body), given)
        body = bytes(body)
        try:
            decoded = self._decoder.decode(body)
        except msgspec.ValidationError:
            return self._decoded_by_member(memoryview(body), given)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            place = str(exc).removeprefix("JSON is malformed: ").lower()
            at = int(found[1]) if (found := _BYTE.search(place)) else 0
            if isinstance(exc, UnicodeDecodeError):
                place = "it is not UTF-8"
            elif body[at : at + 1] == b"'":
                place = f"write names and texts in double quotes (byte {at})"
            elif body[at : at + 1] in (b"N", b"I"):
                place = f"NaN and Infinity are not JSON; use null for a missing number (byte {at})"
            elif "truncated" in place:  # msgspec's word for both
                place = "it ends too early, or a text has half of a surrogate pair"
            raise InvalidJson(f"The body is not JSON: {place}.") from exc
        except RecursionError as exc:
            raise InvalidJson("The body has too many nested levels.") from exc
        if self._takes_any_json:
            check_depth(memoryview(body))
        fields = msgspec.structs.astuple(decoded)
        is_clear = body.count(b":") == len(fields) - fields.count(msgspec.UNSET)
        # The decoder would keep only the last of duplicate names.
        if not is_clear and (b"\\u" in body or any(body.count(name) > 1 for name in self._quoted_names)):
            return self._decoded_by_member(memoryview(body), given)
        pairs = zip(self._fields, fields, strict=True)
        values = {name: value for name, value in pairs if value is not msgspec.UNSET}
        if None in fields:
            values = self._given(values)
        return {**values, **given} if given else values

    def from_form(self, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Form fields or a query string: files are bytes, numbers are text. Raises InvalidInput."""
        values: dict[str, Any] = {}
        problems = [FieldProblem(shown(name), self._no_field(name)) for name in parts if name not in self._fields]
        for name in (name for name in self._fields if name in parts):
            try:
                values[name] = _form_value(self._fields[name], parts[name])
            except (ValueError, InvalidJson) as exc:
                problems.append(_problem_of(name, exc))
                values[name] = msgspec.UNSET
        values = self._given(values)
        problems += self._absent(values)
        if problems:
            hint = None
            for each in problems:
                field = self._fields.get(each.field)
                if each.problem == _NO_TEXT and isinstance(field, InputField) and field.spec.kind == "text":
                    kinds = "declare `kind: image` or `kind: binary` for it in gateway.yaml."
                    hint = hint or f"If '{each.field}' is a file, {kinds}"
            raise refused(problems, hint)
        return values

    def _decoded_by_member(self, body: memoryview, given: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        problems: list[FieldProblem] = []
        for name, text in members_of(body):
            try:
                if name not in self._fields:
                    raise ValueError(self._no_field(name))
                if name in values:
                    raise ValueError("is given twice")
                values[name] = msgspec.UNSET  # if the value is invalid
                values[name] = _decoded(self._fields[name], text)
            except ValueError as exc:
                if not is_json(text):
                    raise malformed() from None
                problems.append(_problem_of(name, exc))
            if len(problems) == MAX_PROBLEMS:
                raise refused(problems)
        values = self._given(values)
        problems += self._absent({*given, *values})
        if problems:
            raise refused(problems)
        return {**values, **given}

    def _given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Removes ``null`` where it means absent."""
        return {name: value for name, value in values.items() if value is not None or name in self._nulls}

    def _no_field(self, name: str) -> str:
        return f"is not a field of this pipeline{nearest(name, self._fields)}"

    def _absent(self, given: Iterable[str]) -> list[FieldProblem]:
        return [
            FieldProblem(name, "is required")
            for name, field in self._fields.items()
            if field.is_required and name not in given
        ]


def _form_value(field: Field, part: Part) -> Any:
    if isinstance(part, list):
        return part
    if not isinstance(field, InputField):
        text = part if isinstance(part, str) else str(part, "utf-8")
        if field.spec.type in ("object", "integers"):
            return _decoded(field, memoryview(text.encode()))
        return msgspec.convert(text, field.json_type, strict=False)
    if field.is_file or (field.takes_file and isinstance(part, FilePart | memoryview)):
        content = part.encode() if isinstance(part, str) else part
        if field.spec.kind == "image" and type(part) is bytes:
            try:
                check_image(part)
            except ValueError as exc:
                raise ValueError(f"{exc}; curl sends a file with -F {field.name}=@FILE") from exc
        return [bytes(content)] if field.is_list_of_files else field.value_of_file(content)
    if field.spec.kind == "text" and field.is_bare:
        return msgspec.convert(part if isinstance(part, str) else str(part, "utf-8"), field.json_type)
    content = memoryview(part.encode() if isinstance(part, str) else part)
    check_depth(content)
    return _decoded(field, content)


def _decoded(field: Field, text: memoryview) -> Any:
    """Decodes the JSON text of a value; None for null. Raises ValueError."""
    try:
        if len(text) >= LARGE_BYTES and isinstance(field, InputField):
            return field.decode_large(text)
        return msgspec.json.decode(text, type=field.json_type)
    except ValueError:
        if not is_null(text):
            raise
    return None


def is_null(text: memoryview) -> bool:
    return _NULL.fullmatch(text) is not None


def refused(problems: Sequence[FieldProblem], hint: str | None = None) -> InvalidInput:
    """Returns the error that names the first problem and lists at most MAX_PROBLEMS."""
    first = problems[0] if problems else FieldProblem("body", "does not fit")
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    text = f"'{first.field}' {first.problem}{more}"
    return InvalidInput(text if text.endswith("?") else f"{text}.", hint=hint, errors=problems[:MAX_PROBLEMS])


def _problem_of(name: str, exc: Exception) -> FieldProblem:
    if isinstance(exc, UnicodeError):
        return FieldProblem(name, _NO_TEXT)
    if isinstance(exc, msgspec.ValidationError):
        return problem_of_value(name, str(exc))
    return FieldProblem(shown(name), "is not JSON" if isinstance(exc, (msgspec.DecodeError, InvalidJson)) else str(exc))


def problem_of_value(name: str, text: str) -> FieldProblem:
    """The problem as the end of a sentence about the field, without quotes of the input.

    ``text``: msgspec's message, with the path inside the value.
    """
    found = _PATH.search(text)
    place, text = (name + found["path"], text[: found.start()]) if found else (name, text)
    text = text.replace("`", "")
    if text == "Expected array of length <= 1" and not (found and found["path"]):
        return FieldProblem(name, "takes one item in a request; several need `batch: true` in gateway.yaml")
    if text.startswith("Expected "):
        words = text.removeprefix("Expected ").replace(", got float", ", not a decimal number")
        words = words.replace(", got ", ", not ").replace(" | ", " or ")
        return FieldProblem(place, "must be " + _TYPE_NAME.sub(lambda found: _WORDS_BY_TYPE[found[0]], words))
    if text.startswith("Object missing required field "):
        field = text.removeprefix("Object missing required field ")
        return FieldProblem(place, f"must have the field '{field}'")
    if text.startswith("Object contains unknown field"):
        return FieldProblem(place, "has a field that is not supported")
    is_listed = text.startswith(("Invalid enum", "Invalid value"))
    return FieldProblem(place, "is not one of the allowed values" if is_listed else "is out of range")
