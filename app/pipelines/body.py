"""A request's body -> its fields, decoded in one pass by a type compiled for the pipeline.

The type refuses what does not fit at once, without the field's value ever being looked at from Python. Only a body that
was refused is read a second time, field by field, to name everything that is wrong with it.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from app.domain.errors import FieldProblem, InvalidInput, InvalidJson, InvalidRequest
from app.pipelines.fields import InputField, ParameterField

MAX_PROBLEMS = 8
_BY_NAME = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`\Z")

Field = InputField | ParameterField


class BodyReader:
    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        self._fields = {field.name: field for field in fields}
        attributes = {f"field_{index}": field for index, field in enumerate(fields)}
        self.struct = msgspec.defstruct(
            name,
            [_struct_field(attribute, field) for attribute, field in attributes.items()],
            rename={attribute: field.name for attribute, field in attributes.items()},
            forbid_unknown_fields=True,
            kw_only=True,
        )
        self._decoder = msgspec.json.Decoder(self.struct)

    def from_json(self, body: bytes | msgspec.Raw) -> dict[str, Any]:
        """Raises InvalidJson, InvalidRequest or InvalidInput."""
        try:
            decoded = self._decoder.decode(body)
        except msgspec.ValidationError:
            raise self._refusal_of(body) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise InvalidJson(f"The body is not JSON: {_position_of(exc)}.") from exc
        except RecursionError as exc:
            raise InvalidJson("The body is nested too deeply.") from exc
        values = zip(self._fields, msgspec.structs.astuple(decoded), strict=True)
        return {name: value for name, value in values if value is not msgspec.UNSET and value is not None}

    def from_form(self, parts: Mapping[str, str | bytes]) -> dict[str, Any]:
        """Form fields or a query string: files are bytes, numbers are text. Raises InvalidInput."""
        values: dict[str, Any] = {}
        problems = self._names_that_do_not_fit(parts)
        for name in (name for name in self._fields if name in parts):
            try:
                values[name] = _form_value(self._fields[name], parts[name])
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
                problems.append(_problem_of(name, exc))
        if problems:
            raise _refused(problems)
        return values

    def _refusal_of(self, body: bytes | msgspec.Raw) -> InvalidInput | InvalidRequest | InvalidJson:
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
            values = _BY_NAME.decode(body)
        except msgspec.ValidationError:
            return InvalidRequest("The body must be one JSON object.", hint='Send {"<input>": <value>, ...}.')
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return InvalidJson("The body is not JSON, or it is nested too deeply.")
        present = {name: value for name, value in values.items() if bytes(value) != b"null" or self._takes_null(name)}
        return _refused(self._names_that_do_not_fit(present) + self._values_that_do_not_fit(present))

    def _takes_null(self, name: str) -> bool:
        """Null is as good as nothing, except where any JSON is a value."""
        return name in self._fields and self._fields[name].json_type is msgspec.Raw

    def _names_that_do_not_fit(self, values: Mapping[str, Any]) -> list[FieldProblem]:
        unknown = islice((name for name in values if name not in self._fields), MAX_PROBLEMS)
        absent = [name for name, field in self._fields.items() if field.is_required and name not in values]
        return [FieldProblem(_printable(name), "is not a field of this pipeline") for name in unknown] + [
            FieldProblem(name, "is required") for name in absent
        ]

    def _values_that_do_not_fit(self, values: Mapping[str, msgspec.Raw]) -> list[FieldProblem]:
        problems = []
        for name, field in self._fields.items():
            if name not in values:
                continue
            try:
                msgspec.json.decode(values[name], type=field.json_type)
            except (msgspec.MsgspecError, UnicodeError) as exc:
                problems.append(_problem_of(name, exc))
        return problems


def _struct_field(attribute: str, field: Field) -> tuple[str, Any] | tuple[str, Any, Any]:
    if field.is_required:
        return attribute, field.json_type
    if field.json_type is msgspec.Raw:
        return attribute, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET
    return attribute, field.json_type | None | msgspec.UnsetType, msgspec.UNSET


def _form_value(field: Field, part: str | bytes) -> Any:
    if isinstance(field, ParameterField):
        return msgspec.convert(_text_of(part), field.json_type, strict=False)
    if field.is_file:
        return part.encode() if isinstance(part, str) else part
    if field.spec.kind == "text" and field.is_bare:
        return msgspec.convert(_text_of(part), field.json_type)
    return msgspec.json.decode(part, type=field.json_type)


def _text_of(part: str | bytes) -> str:
    return part.decode("utf-8") if isinstance(part, bytes) else part


def _refused(problems: list[FieldProblem]) -> InvalidInput:
    first = problems[0] if problems else FieldProblem("body", "does not fit")
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return InvalidInput(f"'{first.field}' {first.problem}{more}.", errors=problems[:MAX_PROBLEMS])


def _problem_of(name: str, exc: Exception) -> FieldProblem:
    if not isinstance(exc, msgspec.ValidationError):
        return FieldProblem(name, "is not UTF-8 text" if isinstance(exc, UnicodeError) else "is not JSON")
    text = str(exc)
    found = _PATH.search(text)
    path = found["path"] if found else ""
    return FieldProblem(name + path, _reworded(text[: found.start()] if found else text))


def _reworded(text: str) -> str:
    """msgspec's words as the end of a sentence about the field; what it quotes of the input is left out."""
    text = text.replace("`", "")
    if text.startswith("Expected "):
        return "must be " + text.removeprefix("Expected ").replace(", got ", ", not ")
    return "is not one of the allowed values" if text.startswith("Invalid enum") else "is out of range"


def _position_of(exc: Exception) -> str:
    if isinstance(exc, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(exc).removeprefix("JSON is malformed: ").lower()


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in name[:64])
