"""``tools``, ``tool_choice``, calls in messages, and the variables for reasoning of a chat request.

Only pipelines that declare ``openai: tools`` or ``openai: reasoning`` have these fields.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from app.api.openai.choice_parts import AnswerReader
from app.api.openai.members import NOT_SUPPORTED, Members, take
from app.codecs.json_scan import has_more_elements
from app.core.errors import FieldProblem, InvalidJson
from app.core.text import shown
from app.llm.answer_formats import PROMPT_END, calls_schema, parser_of
from app.llm.answer_parser import Parser, Tools
from app.llm.tool_calls import GuidedParser
from app.pipelines.body import refused
from app.pipelines.openai_mapping import TextForm

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 128 * 1024
"""The tools are part of the prompt."""
MAX_TOOL_ELEMENTS = 16_384
MAX_SCHEMA_DEPTH = 32
MAX_ARGUMENT_ELEMENTS = 16_384
"""Limit of the values in the arguments of all calls in the messages."""
MAX_VARIABLES_BYTES = 4096

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


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
_Choice = str | _NamedChoice | _AllowedChoice
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class _CalledFunction(Struct, forbid_unknown_fields=True):
    name: FunctionName
    arguments: str


class _Call(Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(max_length=256)]
    function: _CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Turn(Struct, kw_only=True):
    """A message of a conversation with tools or reasoning."""

    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``described``: the tools for the template; None for none. ``callable``: those that the answer may call."""

    described: Sequence[Mapping[str, Any]] | None = None
    callable: Tools = field(default_factory=dict)
    is_required: bool = False
    is_named: bool = False
    is_parallel: bool = True

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The schema of an answer that must be a call. Raises InvalidInput."""
        if not self.is_required:
            return None
        if self.is_named:
            return {"type": "object", **next(iter(self.callable.values()))}
        try:
            return calls_schema(self.callable, is_parallel=self.is_parallel)
        except ValueError as exc:
            raise refused([FieldProblem("tools", str(exc))]) from exc


def take_tools(members: Members, form: TextForm) -> ToolUse:
    """Leaves the members alone if the model has no tools. Raises InvalidInput or InvalidJson."""
    if form.tools is None:
        return ToolUse()
    if len(members.get("tools", b"")) > MAX_TOOLS_BYTES:
        raise refused([FieldProblem("tools", f"has more than {MAX_TOOLS_BYTES} bytes")])
    tools: list[_Tool] = take(members, "tools", ToolList, [], max_elements=MAX_TOOL_ELEMENTS)
    choice: _Choice = take(members, "tool_choice", ToolChoice, "auto")
    is_parallel = take(members, "parallel_tool_calls", bool, True)
    problems = list(_problems_of(tools, choice))
    if problems:
        raise refused(problems)
    if not tools or choice == "none":
        return ToolUse()
    names = _names_in(choice) or [tool.function.name for tool in tools]
    if isinstance(choice, _AllowedChoice):
        tools = [tool for tool in tools if tool.function.name in names]
    mode = choice.allowed_tools.mode if isinstance(choice, _AllowedChoice) else choice
    return ToolUse(
        described=[_as_template_has_it(tool.function) for tool in tools],
        callable={
            tool.function.name: tool.function.parameters or _NO_PARAMETERS
            for tool in tools
            if tool.function.name in names
        },
        is_required=mode != "auto",
        is_named=isinstance(choice, _NamedChoice),
        is_parallel=is_parallel,
    )


def take_variables(members: Members, form: TextForm) -> dict[str, Any]:
    """Returns the caller's variables for the template; none if the model has no reasoning.

    Raises InvalidInput or InvalidJson.
    """
    if form.reasoning is None:
        return {}
    assert form.template is not None
    name = "chat_template_kwargs"
    if len(members.get(name, b"")) > MAX_VARIABLES_BYTES:
        raise refused([FieldProblem(name, f"has more than {MAX_VARIABLES_BYTES} bytes")])
    variables: dict[str, Any] = take(members, name, dict[str, Any], {})
    reserved = form.template.reserved & variables.keys()
    if reserved:
        raise refused([FieldProblem(f"{name}.{shown(each)}", "cannot be set") for each in sorted(reserved)])
    effort = take(members, "reasoning_effort", ReasoningEffort, None)
    return variables if effort is None else {**variables, "reasoning_effort": effort}


def members_of_turns(turns: Sequence[Turn], form: TextForm) -> Sequence[Mapping[str, Any]]:
    """Returns what each message has for the template in addition. Raises InvalidInput."""
    problems = [each for index, turn in enumerate(turns) for each in _problems_of_turn(index, turn, form)]
    if problems:
        raise refused(problems)
    arguments = iter(_arguments_of([call for turn in turns for call in turn.tool_calls or ()]))
    return [_members_of_turn(turn, arguments) for turn in turns]


def reader_of(form: TextForm, use: ToolUse, prompt: str) -> Callable[[], AnswerReader] | None:
    """Returns a function that makes the reader of one choice; None if the answer is only text."""
    parser: Callable[[], Parser | None]
    if use.is_required and form.guided is not None:
        parser = partial(GuidedParser, use.callable, is_named=use.is_named)
    else:
        parser = partial(parser_of, form.tools, use.callable, form.reasoning, prompt[-PROMPT_END:])
    if parser() is None:
        return None

    def reader() -> AnswerReader:
        made = parser()
        assert made is not None
        return AnswerReader(
            made,
            is_required=use.is_required,
            is_named=use.is_named,
            is_parallel=use.is_parallel,
            has_short_ids=form.tools == "mistral",
        )

    return reader


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def _names_in(choice: _Choice) -> Sequence[str]:
    """The functions that a choice names."""
    if isinstance(choice, _NamedChoice):
        return [choice.function.name]
    return [each.function.name for each in choice.allowed_tools.tools] if isinstance(choice, _AllowedChoice) else []


def _problems_of(tools: Sequence[_Tool], choice: _Choice) -> Iterator[FieldProblem]:
    names = [tool.function.name for tool in tools]
    for index, tool in enumerate(tools):
        field_ = f"tools[{index}].function"
        if names.index(tool.function.name) < index:
            yield FieldProblem(f"{field_}.name", "is given twice")
        parameters = tool.function.parameters or _NO_PARAMETERS
        if parameters.get("type", "object") != "object":
            yield FieldProblem(f"{field_}.parameters", "must describe an object")
        if is_deeper(parameters, MAX_SCHEMA_DEPTH):
            yield FieldProblem(f"{field_}.parameters", f"has more than {MAX_SCHEMA_DEPTH} levels")
    if not set(_names_in(choice)) <= set(names):
        yield FieldProblem("tool_choice", "names a function that is not in tools")
    if choice == "required" and not tools:
        yield FieldProblem("tool_choice", "needs tools")


def is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return levels == 0 or any(is_deeper(each, levels - 1) for each in inner)
    return False


def _as_template_has_it(function: _Function) -> Mapping[str, Any]:
    described = {"name": function.name, "description": function.description or ""}
    return {"type": "function", "function": {**described, "parameters": function.parameters or _NO_PARAMETERS}}


def _problems_of_turn(index: int, turn: Turn, form: TextForm) -> Iterator[FieldProblem]:
    at, role = f"messages[{index}]", turn.role
    if form.tools is None and role == "tool":
        yield FieldProblem(f"{at}.role", NOT_SUPPORTED)
    elif role == "tool" and turn.tool_call_id is None:
        yield FieldProblem(f"{at}.tool_call_id", "is required")
    if turn.tool_calls and (form.tools is None or role != "assistant"):
        text = NOT_SUPPORTED if form.tools is None else "is only allowed with the role assistant"
        yield FieldProblem(f"{at}.tool_calls", text)
    if turn.content is None and (role != "assistant" or not turn.tool_calls):
        yield FieldProblem(f"{at}.content", "is required")


def _arguments_of(calls: Sequence[_Call]) -> Sequence[Mapping[str, Any]]:
    """Reads the arguments of all calls as one list, because their limit is for all of them. Raises InvalidInput."""
    text = f"[{','.join(call.function.arguments or '{}' for call in calls)}]".encode()
    problem = "must be JSON objects"
    try:
        if has_more_elements(memoryview(text), MAX_ARGUMENT_ELEMENTS):
            problem = f"have more than {MAX_ARGUMENT_ELEMENTS} elements"
        else:
            arguments: list[dict[str, Any]] = msgspec.json.decode(text, type=list[dict[str, Any]])
            if len(arguments) == len(calls):
                return arguments
    except (InvalidJson, ValueError, RecursionError):
        pass
    raise refused([FieldProblem("messages[...].tool_calls[...].function.arguments", problem)])


def _members_of_turn(turn: Turn, arguments: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The template gets arguments as an object, and the reasoning under the names of Qwen's and gpt-oss' templates.

    The template of gpt-oss refuses a call with reasoning and a text.
    """
    members: dict[str, Any] = {}
    if turn.tool_calls:
        functions = [{"name": call.function.name, "arguments": next(arguments)} for call in turn.tool_calls]
        ids = [call.id for call in turn.tool_calls]
        members["tool_calls"] = [
            {"id": id_, "type": "function", "function": function} for id_, function in zip(ids, functions, strict=True)
        ]
    if turn.tool_call_id is not None:
        members["tool_call_id"] = turn.tool_call_id
    reasoning = turn.reasoning_content or turn.reasoning
    if reasoning:
        members["reasoning_content"] = reasoning
        if not (turn.tool_calls and turn.content):
            members["thinking"] = reasoning
    return members
