"""``tools``, ``tool_choice``, calls in messages, and the variables for reasoning of a chat request.

Only pipelines that declare ``openai: tools`` or ``openai: reasoning`` have these fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from app.api.openai.members import NOT_SUPPORTED, Members, check_size_of, take
from app.codecs.json_scan import has_more_elements
from app.core.errors import FieldProblem, InvalidJson
from app.core.text import shown
from app.llm.answer_formats import calls_schema
from app.llm.answer_parser import Tools
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
    """An answer without a call is an error."""
    is_named: bool = False
    """The request names the function."""
    is_parallel: bool = True
    """If not, calls after the first are left out."""
    has_short_ids: bool = False
    """Whether the ids of calls are as Mistral's templates want them."""

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


NO_TOOLS = ToolUse()


def take_tools(members: Members, form: TextForm) -> ToolUse:
    """Leaves the members alone if the model has no tools. Raises InvalidInput or InvalidJson."""
    if form.tools is None:
        return NO_TOOLS
    check_size_of(members, "tools", MAX_TOOLS_BYTES)
    tools: list[_Tool] = take(members, "tools", ToolList, [], max_elements=MAX_TOOL_ELEMENTS)
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
        if is_deeper(parameters, MAX_SCHEMA_DEPTH):
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


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return levels == 0 or any(is_deeper(each, levels - 1) for each in inner)
    return False


def members_of_turns(turns: Sequence[Turn], form: TextForm) -> Sequence[Mapping[str, Any]]:
    """Returns what each message has for the template in addition. Raises InvalidInput.

    The template gets arguments as an object, and the reasoning under the names of Qwen's and gpt-oss' templates. The
    template of gpt-oss refuses a call with reasoning and a text.
    """
    problems: list[FieldProblem] = []
    for index, turn in enumerate(turns):
        at, role = f"messages[{index}]", turn.role
        if form.tools is None and role == "tool":
            problems.append(FieldProblem(f"{at}.role", NOT_SUPPORTED))
        elif role == "tool" and turn.tool_call_id is None:
            problems.append(FieldProblem(f"{at}.tool_call_id", "is required"))
        if turn.tool_calls and (form.tools is None or role != "assistant"):
            text = NOT_SUPPORTED if form.tools is None else "is only allowed with the role assistant"
            problems.append(FieldProblem(f"{at}.tool_calls", text))
        if turn.content is None and (role != "assistant" or not turn.tool_calls):
            problems.append(FieldProblem(f"{at}.content", "is required"))
    if problems:
        raise refused(problems)
    arguments = iter(_arguments_of([call for turn in turns for call in turn.tool_calls or ()]))
    found: list[Mapping[str, Any]] = []
    for turn in turns:
        members: dict[str, Any] = {}
        if turn.tool_calls:
            members["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": next(arguments)},
                }
                for call in turn.tool_calls
            ]
        if turn.tool_call_id is not None:
            members["tool_call_id"] = turn.tool_call_id
        if reasoning := turn.reasoning_content or turn.reasoning:
            members["reasoning_content"] = reasoning
            if not (turn.tool_calls and turn.content):
                members["thinking"] = reasoning
        found.append(members)
    return found


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
