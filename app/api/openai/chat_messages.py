"""The messages of a chat: what the chat template gets, and their images."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from app.api.downloads import ImageDownloads
from app.api.openai.members import Labels, Members, required, take
from app.api.openai.tools import Turn, members_of_turns
from app.codecs.kinds import bytes_of_base64, check_image
from app.core.errors import FieldProblem
from app.llm.contents import IMAGE, Content
from app.pipelines.body import refused
from app.pipelines.openai_mapping import TextForm

MAX_MESSAGE_ELEMENTS = 16_384
"""Limit of roles, contents and parts of contents together."""
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


class CallMessage(Turn, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
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


class Conversation(Struct, frozen=True):
    """``messages``: as the chat template gets them. ``images``: all of them, in their order."""

    messages: list[Mapping[str, Any]] = []
    images: Sequence[Image] = ()

    @property
    def needs_downloads(self) -> bool:
        return any(image.address for image in self.images)

    async def downloaded(self, downloads: ImageDownloads | None, count: Callable[[int], None]) -> "Conversation":
        """Returns the conversation with all images. An address that is given several times is downloaded once.

        ``count`` gets the bytes of each piece, and may raise. Raises InvalidInput, and the errors of ``count``.
        """
        found: dict[str, bytes] = {}
        problems: list[FieldProblem] = []

        async def download(image: Image) -> None:
            assert downloads is not None
            try:
                found[image.address] = await downloads.download(image.address, count)
            except ValueError as exc:
                problems.append(FieldProblem(image.at, str(exc)))

        try:
            async with asyncio.TaskGroup() as group:
                for image in {each.address: each for each in self.images if each.address}.values():
                    group.create_task(download(image))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if problems:
            raise refused(problems)
        images = [Image(image.at, found[image.address]) if image.address else image for image in self.images]
        return replace(self, images=images)


def take_conversation(members: Members, form: TextForm, downloads: ImageDownloads | None) -> Conversation:
    """Takes the messages out, and decodes their images. ``downloads``: None if addresses are not allowed.

    Raises InvalidInput or InvalidJson.
    """
    messages = _take_messages(members, form)
    further: Sequence[Mapping[str, Any]] = [{}] * len(messages)
    if form.tools is not None or form.reasoning is not None:
        further = members_of_turns(messages, form)
    described = [_as_template_has_it(message) for message in messages]
    images = _read_images(_image_parts(messages, members, form), downloads)
    return Conversation([{**message, **more} for message, more in zip(described, further, strict=True)], images)


def _take_messages(members: Members, form: TextForm) -> Sequence[Any]:
    type_: Any = PlainMessage if form.tools is None and form.reasoning is None else CallMessage
    messages: Sequence[Any] | None = take(
        members, "messages", Annotated[list[type_], Meta(min_length=1)], None, max_elements=MAX_MESSAGE_ELEMENTS
    )
    if messages is None:
        raise required("messages")
    return messages


def _image_parts(messages: Sequence[Any], members: Members, form: TextForm) -> Mapping[str, ImagePart]:
    """Returns the images of the messages by their places. Raises InvalidInput if one may not be there."""
    found: dict[str, ImagePart] = {}
    problems: list[FieldProblem] = []
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                at = f"messages[{index}].content[{number}]"
                found[at] = part
                problem = _problem_of(message.role, len(found), form)
                problems += [] if problem is None else [FieldProblem(at, problem)]
    if found and form.images is not None:
        names = [name for name, field in form.field_by_parameter.items() if field == form.images.input]
        problems += [FieldProblem(name, "is not allowed with images in messages") for name in names if name in members]
    if problems:
        raise refused(problems, NO_IMAGES if form.images is None else None)
    return found


def _problem_of(role: str, images: int, form: TextForm) -> str | None:
    """``images``: the number of images up to this one."""
    if form.images is None:
        return "is an image, and the model takes only texts"
    if role != "user":
        return "is an image, which only a message of the role user can have"
    most = form.images.most
    return f"is one image too many: a request may have {most}" if images > most else None


def _read_images(parts: Mapping[str, ImagePart], downloads: ImageDownloads | None) -> Sequence[Image]:
    """Raises InvalidInput."""
    images: list[Image] = []
    problems: list[FieldProblem] = []
    for part_at, part in parts.items():
        at = f"{part_at}.image_url.url"
        try:
            images.append(_read_image(at, part.image_url.url, downloads))
        except ValueError as exc:
            problems.append(FieldProblem(at, str(exc)))
    if problems:
        raise refused(problems)
    return images


def _read_image(at: str, url: str, downloads: ImageDownloads | None) -> Image:
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


def _as_template_has_it(message: Any) -> Mapping[str, Any]:
    """Returns one text for each message, or parts if it has images.

    ``developer``, OpenAI's newer name, becomes ``system`` for open models.
    """
    role = "system" if message.role == "developer" else message.role
    content = _content_of(message.content)
    return {"role": role, "content": content, **({"name": message.name} if message.name is not None else {})}


def _content_of(parts: str | Parts | None) -> Content:
    if isinstance(parts, str) or parts is None:
        return parts or ""
    if any(isinstance(part, ImagePart) for part in parts):
        return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else IMAGE for part in parts]
    return "".join(part.text for part in parts if isinstance(part, TextPart))
