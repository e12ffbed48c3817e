"""``response_format`` of a chat request: the backend is held to the format where it can be, else the answer is checked.

Source: OpenAI's reference of structured outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from app.api.openai.members import NOT_SUPPORTED, Members, take
from app.api.openai.tools import MAX_SCHEMA_DEPTH, FunctionName, ToolUse, is_deeper
from app.core.errors import FieldProblem, FormatMismatch
from app.core.text import shown
from app.llm.answer_schema import (
    CAN_CHECK,
    MAX_ANSWER_CHARACTERS,
    TOO_LARGE,
    AnswerSchema,
    check_references,
)
from app.pipelines.body import refused
from app.pipelines.openai_mapping import TextForm

FIELD = "response_format"
MAX_FORMAT_BYTES = 128 * 1024
LONGEST_WITHOUT_SCHEMA = 64
"""Bytes of a format without a schema."""
MAX_FORMAT_ELEMENTS = 16_384
_LONG_TEXT = 64 * 1024
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class _Text(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class _JsonObject(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class _NamedSchema(Struct, forbid_unknown_fields=True):
    name: FunctionName
    description: Annotated[str, Meta(max_length=1024)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _JsonSchema(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: _NamedSchema


ResponseFormat = _Text | _JsonObject | _JsonSchema


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """``guided``: the schema for the backend. ``checked``: what the gateway checks. Both None for any text."""

    guided: Mapping[str, Any] | None = None
    checked: AnswerSchema | None = None


def take_format(members: Members, form: TextForm, tools: ToolUse) -> AnswerFormat:
    """Tools that the model may call and a schema exclude each other in a backend, so then the answer is checked.

    Raises InvalidInput or InvalidJson.
    """
    if len(members.get(FIELD, b"")) > MAX_FORMAT_BYTES:
        raise _refused(f"has more than {MAX_FORMAT_BYTES} bytes")
    given: ResponseFormat = take(members, FIELD, ResponseFormat, _Text(), max_elements=MAX_FORMAT_ELEMENTS)
    if isinstance(given, _Text):
        return AnswerFormat()
    if tools.is_required:
        raise _refused("is not allowed with a tool_choice that requires a call")
    schema = given.json_schema.schema if isinstance(given, _JsonSchema) else None
    if schema is not None and is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise _refused(f"has more than {MAX_SCHEMA_DEPTH} levels", "json_schema.schema")
    try:
        if form.guided is not None and not tools.callable:
            check_references(schema or {})
            return AnswerFormat(guided=_ANY_OBJECT if schema is None else schema)
        if schema is not None and not CAN_CHECK:
            raise _refused(f"{NOT_SUPPORTED}: the gateway lacks the extra jsonschema-rs")
        return AnswerFormat(checked=AnswerSchema.of(schema))
    except ValueError as exc:
        raise _refused(shown(str(exc), 256), "json_schema.schema") from exc


class FormatCheck:
    """Collects the text of one choice, and checks it at the end."""

    def __init__(self, schema: AnswerSchema) -> None:
        self._schema = schema
        self._pieces: list[str] = []
        self._length = 0

    def add(self, text: str) -> None:
        self._length += len(text)
        if self._length <= MAX_ANSWER_CHARACTERS:
            self._pieces.append(text)

    @property
    def is_slow(self) -> bool:
        return self._schema.has_rules or self._length > _LONG_TEXT

    def finish(self) -> None:
        """Raises FormatMismatch."""
        is_whole = self._length <= MAX_ANSWER_CHARACTERS
        problem = self._schema.problem_of("".join(self._pieces)) if is_whole else TOO_LARGE
        if problem is not None:
            raise FormatMismatch(f"The model's answer {shown(problem, 256)}.")


def _refused(problem: str, inside: str = "") -> Exception:
    return refused([FieldProblem(f"{FIELD}.{inside}" if inside else FIELD, problem)])
