"""The messages of a chat: what the chat template gets, and their images."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from app.api.call import InferenceCall
from app.api.downloads import ImageDownloads
from app.api.exchange import Exchange
from app.api.openai.members import NOT_SUPPORTED, FunctionName, Labels, Members, required, take
from app.codecs.json_scan import has_more_elements
from app.codecs.kinds import bytes_of_base64, check_image
from app.core.errors import DeadlineExceeded, FieldProblem, InvalidJson
from app.llm.template import IMAGE, Content
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
        turn: dict[str, Any] = {"role": role, "content": _content_of(message.content)}
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
    """Decodes the images of the messages if all of them are allowed. Raises InvalidInput."""
    parts = {
        f"messages[{index}].content[{number}]": (message.role, part)
        for index, message in enumerate(messages)
        for number, part in enumerate(message.content if isinstance(message.content, list) else ())
        if isinstance(part, ImagePart)
    }
    if not parts:
        return ()
    if form.images is None:
        raise refused([FieldProblem(at, "is an image, and the model takes only texts") for at in parts], NO_IMAGES)
    problems: list[FieldProblem] = []
    for count, (at, (role, _)) in enumerate(parts.items(), 1):
        if role != "user":
            problems.append(FieldProblem(at, "is an image, which only a message of the role user can have"))
        elif count > (most := form.images.most):
            problems.append(FieldProblem(at, f"is one image too many: a request may have {most}"))
    names = [name for name, field in form.field_by_parameter.items() if field == form.images.input]
    problems += [FieldProblem(name, "is not allowed with images in messages") for name in names if name in members]
    if problems:
        raise refused(problems)
    images: list[Image] = []
    for part_at, (_, part) in parts.items():
        at = f"{part_at}.image_url.url"
        try:
            images.append(_image_of(at, part.image_url.url, downloads))
        except ValueError as exc:
            problems.append(FieldProblem(at, str(exc)))
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


def _content_of(parts: str | Parts | None) -> Content:
    """One text, or parts if there are images."""
    if isinstance(parts, str) or parts is None:
        return parts or ""
    if any(isinstance(part, ImagePart) for part in parts):
        return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else IMAGE for part in parts]
    return "".join(part.text for part in parts if isinstance(part, TextPart))


async def downloaded(
    images: Sequence[Image], downloads: ImageDownloads, exchange: Exchange, call: InferenceCall, most: int
) -> Sequence[Image]:
    """Returns all images with their bytes, which count as those of the body: at most ``most``.

    An address that is given several times is downloaded once.

    Raises TooManyRequests if the model is busy, InvalidInput, DeadlineExceeded or ClientClosedRequest.
    """
    call.claim.check(call.deadline)
    found: dict[str, bytes] = {}
    problems: list[FieldProblem] = []
    size = 0

    def count(piece: int) -> None:
        nonlocal size
        size += piece
        if size > most:
            raise ValueError(f"is too large: the images of a request may have {most} bytes")
        exchange.hold(piece)

    async def download(image: Image) -> None:
        try:
            found[image.address] = await downloads.download(image.address, count)
        except ValueError as exc:
            problems.append(FieldProblem(image.at, str(exc)))

    try:
        async with asyncio.timeout(call.deadline.remaining_s()):
            with exchange.cancelled_on_disconnect():
                async with asyncio.TaskGroup() as group:
                    for image in {each.address: each for each in images if each.address}.values():
                        group.create_task(download(image))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    except TimeoutError as exc:
        raise DeadlineExceeded("The deadline passed while the images were downloaded.") from exc
    if problems:
        raise refused(problems)
    return [Image(each.at, found[each.address]) if each.address else each for each in images]
