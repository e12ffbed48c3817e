"""What a chat request says of its answer: ``tools``, ``tool_choice``, ``response_format`` and reasoning.

Only pipelines that declare ``openai: tools`` or ``openai: reasoning`` have these fields; all have ``response_format``:
the backend is held to the format where it can be, else the answer is checked.

Source: OpenAI's reference of function calling and structured outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from app.api.openai.members import NOT_SUPPORTED, FunctionName, Members, check_size_of, take
from app.core.errors import FieldProblem, InvalidInput
from app.core.text import shown
from app.llm.answer_parser import Tools
from app.llm.answer_schema import CAN_CHECK, AnswerSchema, answer_schema_of, check_references
from app.llm.tool_calls import calls_schema
from app.pipelines.body import refused
from app.pipelines.openai_mapping import TextForm

MAX_TOOLS = 128
MAX_SCHEMAS_BYTES = 128 * 1024
"""Limit of the tools, which are part of the prompt, and of a format."""
MAX_SCHEMAS_ELEMENTS = 16_384
MAX_SCHEMA_DEPTH = 32
MAX_VARIABLES_BYTES = 4096


class _Function(Struct, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _NamedFunction(Struct, forbid_unknown_fields=True):
    name: FunctionName


class _NamedChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: _NamedFunction


class _AllowedTools(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class _AllowedChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Only some of the tools may be called."""

    allowed_tools: _AllowedTools


ToolList = Annotated[list[_Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | _NamedChoice | _AllowedChoice
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``described``: the tools for the template; None for none. ``callable``: those that the answer may call."""

    described: Sequence[Mapping[str, Any]] | None = None
    callable: Tools = field(default_factory=dict)
    is_required: bool = False
    """An answer without a call is an error."""
    is_named: bool = False
    """The request names the function."""
    is_parallel: bool = True
    """If not, calls after the first are left out."""
    has_short_ids: bool = False
    """Whether the ids of calls are as Mistral's templates want them."""


NO_TOOLS = ToolUse()


def take_tools(members: Members, form: TextForm) -> ToolUse:
    """Leaves the members alone if the model has no tools. Raises InvalidInput or InvalidJson."""
    if form.tools is None:
        return NO_TOOLS
    check_size_of(members, "tools", MAX_SCHEMAS_BYTES)
    tools: list[_Tool] = take(members, "tools", ToolList, [], max_elements=MAX_SCHEMAS_ELEMENTS)
    choice: str | _NamedChoice | _AllowedChoice = take(members, "tool_choice", ToolChoice, "auto")
    is_parallel = take(members, "parallel_tool_calls", bool, True)
    functions = {tool.function.name: tool.function.parameters or _NO_PARAMETERS for tool in tools}
    problems: list[FieldProblem] = []
    for index, function in enumerate(tool.function for tool in tools):
        at, parameters = f"tools[{index}].function", function.parameters or _NO_PARAMETERS
        if any(each.function.name == function.name for each in tools[:index]):
            problems.append(FieldProblem(f"{at}.name", "is given twice"))
        if parameters.get("type", "object") != "object":
            problems.append(FieldProblem(f"{at}.parameters", "must describe an object"))
        if _is_deeper(parameters, MAX_SCHEMA_DEPTH):
            problems.append(FieldProblem(f"{at}.parameters", f"has more than {MAX_SCHEMA_DEPTH} levels"))
    mode, named, described = choice, list(functions), list(functions)
    if isinstance(choice, _NamedChoice):
        mode, named = "required", [choice.function.name]
    elif isinstance(choice, _AllowedChoice):
        mode = choice.allowed_tools.mode
        named = described = [each.function.name for each in choice.allowed_tools.tools]
    if not functions.keys() >= set(named):
        problems.append(FieldProblem("tool_choice", "names a function that is not in tools"))
    if choice == "required" and not tools:
        problems.append(FieldProblem("tool_choice", "needs tools"))
    if problems:
        raise refused(problems)
    if not tools or choice == "none":
        return NO_TOOLS
    texts = {tool.function.name: tool.function.description or "" for tool in tools}
    return ToolUse(
        described=[
            {"type": "function", "function": {"name": name, "description": texts[name], "parameters": parameters}}
            for name, parameters in functions.items()
            if name in described
        ],
        callable={name: parameters for name, parameters in functions.items() if name in named},
        is_required=mode == "required",
        is_named=isinstance(choice, _NamedChoice),
        is_parallel=is_parallel,
        has_short_ids=form.tools == "mistral",
    )


def take_variables(members: Members, form: TextForm) -> dict[str, Any]:
    """Returns the caller's variables for the template; none if the model has no reasoning.

    Raises InvalidInput or InvalidJson.
    """
    if form.reasoning is None:
        return {}
    assert form.template is not None
    name = "chat_template_kwargs"
    check_size_of(members, name, MAX_VARIABLES_BYTES)
    variables: dict[str, Any] = take(members, name, dict[str, Any], {})
    reserved = form.template.reserved & variables.keys()
    if reserved:
        raise refused([FieldProblem(f"{name}.{shown(each)}", "cannot be set") for each in sorted(reserved)])
    effort = take(members, "reasoning_effort", ReasoningEffort, None)
    return variables if effort is None else {**variables, "reasoning_effort": effort}


RESPONSE_FORMAT = "response_format"
LONGEST_WITHOUT_SCHEMA = 64
"""Bytes of a format without a schema."""


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
    """Returns the schema for the backend, of the call if one is required, and what the gateway checks.

    Tools that the model may call and a schema exclude each other in a backend, so then the answer is checked.

    Raises InvalidInput or InvalidJson.
    """
    check_size_of(members, RESPONSE_FORMAT, MAX_SCHEMAS_BYTES)
    given: ResponseFormat = take(members, RESPONSE_FORMAT, ResponseFormat, _Text(), max_elements=MAX_SCHEMAS_ELEMENTS)
    if isinstance(given, _Text) and not tools.is_required:
        return None, None
    if isinstance(given, _Text) and tools.is_named:
        return {"type": "object", **next(iter(tools.callable.values()))}, None
    if isinstance(given, _Text):
        try:
            return calls_schema(tools.callable, is_parallel=tools.is_parallel), None
        except ValueError as exc:
            raise refused([FieldProblem("tools", str(exc))]) from exc
    if tools.is_required:
        raise _refused("is not allowed with a tool_choice that requires a call")
    schema = given.json_schema.schema if isinstance(given, _JsonSchema) else None
    if schema is not None and _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise _refused(f"has more than {MAX_SCHEMA_DEPTH} levels", ".json_schema.schema")
    try:
        if form.guided is not None and not tools.callable:
            check_references(schema or {})
            return {"type": "object"} if schema is None else schema, None
        if schema is not None and not CAN_CHECK:
            raise _refused(f"{NOT_SUPPORTED}: the gateway lacks the extra jsonschema-rs")
        return None, answer_schema_of(msgspec.json.encode(schema))
    except ValueError as exc:
        raise _refused(shown(str(exc), 256), ".json_schema.schema") from exc


def _refused(problem: str, inside: str = "") -> InvalidInput:
    return refused([FieldProblem(RESPONSE_FORMAT + inside, problem)])


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)
    return False
