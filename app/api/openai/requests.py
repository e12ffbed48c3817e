"""Converts the body of a completion or chat completion to a request to the pipeline and the answer's options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from app.api.openai.members import Members, body_of_fields, renamed, required, take
from app.api.openai.neutral import NEUTRAL_OF_TEXTS, Labels
from app.domain.errors import FieldProblem, InvalidInput
from app.domain.inference import InferenceRequest
from app.pipelines.body import refused
from app.pipelines.openai.form import TextForm
from app.pipelines.pipeline import Pipeline

MAX_MESSAGE_ELEMENTS = 16_384
"""Limit of roles, contents and parts of contents together."""
_StopText = Annotated[str, Meta(min_length=1, max_length=256)]
_Stop = Annotated[list[_StopText], Meta(min_length=1, max_length=4)] | _StopText


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Labels | None = None


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    annotations: None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """The caller's options for the answer."""

    stream: bool
    include_usage: bool
    stops: tuple[str, ...]


def take_wishes(members: Members, form: TextForm) -> Wishes:
    """Takes the members that the gateway itself reads. Raises InvalidInput or InvalidJson."""
    stream = take(members, "stream", bool, False)
    has_options = "stream_options" in members
    options = take(members, "stream_options", _StreamOptions, _StreamOptions())
    if has_options and not stream:
        raise refused([FieldProblem("stream_options", "is only allowed with stream: true")])
    if options.include_usage and form.usage is None:
        raise refused([FieldProblem("stream_options.include_usage", "is not supported: this model counts no tokens")])
    return Wishes(stream, bool(options.include_usage), _stops_of(take(members, "stop", _Stop, [])))


def completion_request(pipeline: Pipeline, form: TextForm, members: Members) -> InferenceRequest:
    """Raises InvalidInput, InvalidRequest or InvalidJson."""
    prompt = members.pop("prompt", None)
    if prompt is None:
        raise required("prompt")
    return _request_of(pipeline, form, members, prompt, "prompt")


def chat_request(pipeline: Pipeline, form: TextForm, members: Members) -> InferenceRequest:
    """Renders the messages to the prompt with the pipeline's chat template. Raises InvalidInput or InvalidJson."""
    assert form.template is not None
    prompt = msgspec.json.encode(form.template.render(_take_messages(members)))
    return _request_of(pipeline, form, members, memoryview(prompt), "messages")


def _take_messages(members: Members) -> Sequence[Mapping[str, Any]]:
    type_ = Annotated[list[_Message], Meta(min_length=1)]
    messages: list[_Message] | None = take(members, "messages", type_, None, max_elements=MAX_MESSAGE_ELEMENTS)
    if messages is None:
        raise required("messages")
    return [_as_template_has_it(message) for message in messages]


def _request_of(
    pipeline: Pipeline, form: TextForm, members: Members, prompt: memoryview, prompt_name: str
) -> InferenceRequest:
    body = body_of_fields({form.prompt: prompt}, members, form.field_by_parameter, NEUTRAL_OF_TEXTS)
    try:
        return pipeline.request_of_json(body)
    except InvalidInput as exc:
        given = {form.field_by_parameter[name]: name for name in members if name in form.field_by_parameter}
        raise renamed(exc, {**given, form.prompt: prompt_name}) from exc


def _as_template_has_it(message: _Message) -> Mapping[str, Any]:
    """Returns one text for each message. ``developer``, OpenAI's newer name, becomes ``system`` for open models."""
    parts = message.content
    content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({"name": message.name} if message.name is not None else {})}


def _stops_of(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
