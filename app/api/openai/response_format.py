"""``response_format`` of a chat request: the backend is held to the format where it can be, else the answer is checked.

Source: OpenAI's reference of structured outputs.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from app.api.openai.members import NOT_SUPPORTED, Members, check_size_of, take
from app.api.openai.tools import MAX_SCHEMA_DEPTH, FunctionName, ToolUse, is_deeper
from app.core.errors import FieldProblem, InvalidInput
from app.core.text import shown
from app.llm.answer_schema import CAN_CHECK, AnswerSchema, check_references
from app.pipelines.body import refused
from app.pipelines.openai_mapping import TextForm

FIELD = "response_format"
MAX_FORMAT_BYTES = 128 * 1024
LONGEST_WITHOUT_SCHEMA = 64
"""Bytes of a format without a schema."""
MAX_FORMAT_ELEMENTS = 16_384


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


def take_format(
    members: Members, form: TextForm, tools: ToolUse
) -> tuple[Mapping[str, Any] | None, AnswerSchema | None]:
    """Returns the schema for the backend, and what the gateway checks; both None for any text.

    Tools that the model may call and a schema exclude each other in a backend, so then the answer is checked.

    Raises InvalidInput or InvalidJson.
    """
    check_size_of(members, FIELD, MAX_FORMAT_BYTES)
    given: ResponseFormat = take(members, FIELD, ResponseFormat, _Text(), max_elements=MAX_FORMAT_ELEMENTS)
    if isinstance(given, _Text):
        return None, None
    if tools.is_required:
        raise _refused("is not allowed with a tool_choice that requires a call")
    schema = given.json_schema.schema if isinstance(given, _JsonSchema) else None
    if schema is not None and is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise _refused(f"has more than {MAX_SCHEMA_DEPTH} levels", ".json_schema.schema")
    try:
        if form.guided is not None and not tools.callable:
            check_references(schema or {})
            return {"type": "object"} if schema is None else schema, None
        if schema is not None and not CAN_CHECK:
            raise _refused(f"{NOT_SUPPORTED}: the gateway lacks the extra jsonschema-rs")
        return None, AnswerSchema.of(schema)
    except ValueError as exc:
        raise _refused(shown(str(exc), 256), ".json_schema.schema") from exc


def _refused(problem: str, inside: str = "") -> InvalidInput:
    return refused([FieldProblem(FIELD + inside, problem)])
