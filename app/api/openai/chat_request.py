"""What a chat request asks: its messages and their images, and what it says of its answer.

The chat template gets the messages. ``tools``, ``tool_choice``, ``response_format`` and the fields of reasoning
describe the answer. Only pipelines that declare ``openai: tools`` or ``openai: reasoning`` have these fields; all have
``response_format``: the backend is held to the format where it can be, else the answer is checked.

Source: OpenAI's reference of chat completions, function calling and structured outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from app.api.downloads import ImageDownloads
from app.api.openai.requests import NOT_SUPPORTED, FunctionName, Labels, Members, check_size_of, required, take
from app.codecs.json_scan import has_more_elements
from app.codecs.kinds import bytes_of_base64, check_image
from app.core.errors import FieldProblem, InvalidInput, InvalidJson
from app.core.text import shown
from app.llm.answer_parser import Tools
from app.llm.answer_schema import CAN_CHECK, AnswerSchema, answer_schema_of, check_references
from app.llm.template import IMAGE, Content
from app.llm.tool_calls import calls_schema
from app.pipelines.body import refused
from app.pipelines.openai_mapping import TextForm

MAX_MESSAGE_ELEMENTS = 16_384
"""Limit of roles, contents and parts of contents together."""
MAX_ARGUMENT_ELEMENTS = 16_384
"""Limit of the values in the arguments of all calls in the messages."""
NO_IMAGES = "The model needs an input with kind: image, and a chat template or an image_marker with a place for images."


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    prompt_cache_breakpoint: Labels | None = None


Detail = Literal["auto", "low", "high", "original"]


class ImageURL(Struct, forbid_unknown_fields=True):
    url: Annotated[str, Meta(description="A data: URL with base64, or the address of a host that the operator allows.")]
    detail: Annotated[Detail | None, Meta(description="Has no effect: the model decides how it reads an image.")] = None


class ImagePart(Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    image_url: ImageURL
    prompt_cache_breakpoint: Labels | None = None


Parts = list[TextPart | ImagePart]


class PlainMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    annotations: None = None


class _CalledFunction(Struct, forbid_unknown_fields=True):
    name: FunctionName
    arguments: str


class _Call(Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(max_length=256)]
    function: _CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class CallMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: None = None


class Image(Struct, frozen=True):
    """``at``: the caller's field. ``content``: empty if the image must be downloaded from its ``address``."""

    at: str
    content: bytes = b""
    address: str = ""


def take_messages(
    members: Members, form: TextForm, downloads: ImageDownloads | None
) -> tuple[list[Mapping[str, Any]], Sequence[Image]]:
    """Returns the messages as the chat template gets them, and all their images in order.

    The template gets arguments as an object, and the reasoning under the names of Qwen's and gpt-oss' templates. The
    template of gpt-oss refuses a call with reasoning and a text.

    ``downloads``: None if addresses are not allowed. Raises InvalidInput or InvalidJson.
    """
    takes_turns = form.tools is not None or form.reasoning is not None
    type_: Any = CallMessage if takes_turns else PlainMessage
    some = Annotated[list[type_], Meta(min_length=1)]
    given: Sequence[Any] | None = take(members, "messages", some, None, max_elements=MAX_MESSAGE_ELEMENTS)
    if given is None:
        raise required("messages")
    if problems := _problems_of_turns(given, form) if takes_turns else ():
        raise refused(problems)
    arguments = iter(_arguments_of([call for message in given for call in message.tool_calls or ()]))
    images = _images_in(given, members, form, downloads)
    messages: list[Mapping[str, Any]] = []
    for message in given:
        # ``developer``, OpenAI's newer name, becomes ``system`` for open models.
        role = "system" if message.role == "developer" else message.role
        content: Content = message.content or ""
        if isinstance(content, list):  # one text, or parts if there are images
            parts = [{"type": "text", "text": part.text} if isinstance(part, TextPart) else IMAGE for part in content]
            content = parts if IMAGE in parts else "".join(part.text for part in content)
        turn: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_calls:
            turn["tool_calls"] = []
            for call in message.tool_calls:
                function = {"name": call.function.name, "arguments": next(arguments)}
                turn["tool_calls"].append({"id": call.id, "type": "function", "function": function})
        if takes_turns and message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if takes_turns and (reasoning := message.reasoning_content or message.reasoning):
            turn["reasoning_content"] = reasoning
            if not (message.tool_calls and message.content):
                turn["thinking"] = reasoning
        messages.append(turn)
    return messages, images


def _problems_of_turns(turns: Sequence[CallMessage], form: TextForm) -> Sequence[FieldProblem]:
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
    return problems


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


def _images_in(
    messages: Sequence[Any], members: Members, form: TextForm, downloads: ImageDownloads | None
) -> Sequence[Image]:
    """Decodes the images of the messages. Raises InvalidInput."""
    parts = [
        (f"messages[{index}].content[{number}]", message.role, part.image_url.url)
        for index, message in enumerate(messages)
        for number, part in enumerate(message.content if isinstance(message.content, list) else ())
        if isinstance(part, ImagePart)
    ]
    if not parts:
        return ()
    if form.images is None:
        raise refused([FieldProblem(at, "is an image, and the model takes only texts") for at, *_ in parts], NO_IMAGES)
    images, problems, most = list[Image](), list[FieldProblem](), form.images.most
    for count, (at, role, url) in enumerate(parts, 1):
        if role != "user":
            problems.append(FieldProblem(at, "is an image, which only a message of the role user can have"))
        elif count > most:
            problems.append(FieldProblem(at, f"is one image too many: a request may have {most}"))
        else:
            try:
                images.append(_image_of(f"{at}.image_url.url", url, downloads))
            except ValueError as exc:
                problems.append(FieldProblem(f"{at}.image_url.url", str(exc)))
    names = [name for name, field in form.field_by_parameter.items() if field == form.images.input]
    problems += [FieldProblem(name, "is not allowed with images in messages") for name in names if name in members]
    if problems:
        raise refused(problems)
    return images


def _image_of(at: str, url: str, downloads: ImageDownloads | None) -> Image:
    """Raises ValueError."""
    if url[:8].lower().startswith(("http://", "https://")):
        if downloads is None:
            raise ValueError("must be a data: URL; the gateway does not download addresses")
        downloads.check(url)
        return Image(at, address=url)
    if not url.startswith("data:"):
        raise ValueError("must be a data: URL with base64")
    content = bytes_of_base64(url, "image")
    check_image(content)
    return Image(at, content)


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
        if form.openai.guided is not None and not tools.callable:
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
