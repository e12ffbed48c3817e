"""``/v1/completions`` and ``/v1/chat/completions``.

The members of a body become requests for each choice of the answer, which is whole or in chunks.
Source of the answers: the types of OpenAI's Python client.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response

from app.api.bodies import Limits, off_loop
from app.api.call import Inference, InferenceCall
from app.api.downloads import ImageDownloads
from app.api.endpoint import Found
from app.api.exchange import Exchange
from app.api.openai import chat_request
from app.api.openai.choices import ChatChoice, Choice, ChunkResponse, CompletionChoice, TextAnswer, TextOptions
from app.api.openai.requests import (
    NEUTRAL_OF_TEXTS,
    Door,
    Members,
    NamedRequest,
    openai_error_of,
    openai_names,
    required,
    take,
)
from app.api.streaming import Reply
from app.core.errors import DeadlineExceeded, FieldProblem
from app.core.inference import InferenceRequest, new_request_id
from app.llm.tokenizer import COUNTED_AT_ONCE
from app.llm.tool_calls import PROMPT_END, GuidedParser, parser_of
from app.pipelines.body import Body, refused
from app.pipelines.openai_mapping import TextForm
from app.pipelines.spec import ADAPTER

StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = Annotated[list[StopText], Meta(max_length=4)] | StopText


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


MAX_CHOICES = 16
"""Limit of ``n``: each choice is a request to the model."""
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
MAX_LOGPROBS = 20
"""Limit of the alternatives for a token: OpenAI's for chats."""
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
OneText = str | Annotated[list[str], Meta(min_length=1, max_length=1)]
KEEPS_STOP = "include_stop_str_in_output"
"""vLLM's field. The gateway also reads it, because it ends the text itself."""
Fields = dict[str, Body]
"""The pipeline's fields, as JSON."""


async def downloaded(
    images: Sequence[chat_request.Image], downloads: ImageDownloads, exchange: Exchange, call: InferenceCall, most: int
) -> Sequence[chat_request.Image]:
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

    async def download(image: chat_request.Image) -> None:
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
    return [chat_request.Image(each.at, found[each.address]) if each.address else each for each in images]


class TextRoute(Door[TextForm], ABC):
    choice: ClassVar[type[Choice]]
    downloads: ImageDownloads | None = None
    """None if images cannot be given by their addresses."""

    async def post(self, exchange: Exchange, _found: Found) -> Response | None:
        """Sends a whole answer, or returns the response of a stream, which does not keep the request."""
        call, streams = await self._read(exchange)
        if streams:
            exchange.record.transport = "stream"
            with exchange.cancelled_on_disconnect():
                opened = await self.inference.open_stream(call)
            return ChunkResponse(Reply.of(*opened), self.limits)
        with exchange.cancelled_on_disconnect():
            ending = await self.inference.answer(call)
        await exchange.send_json(ending.outputs[0])
        return None

    async def _read(self, exchange: Exchange) -> tuple[InferenceCall, bool]:
        """The call, which keeps no reference to the body, and whether its answer is a stream."""
        named = await self.open(exchange)
        pipeline, form, members = named.pipeline, named.form, named.members
        has_schema = len(members.get(chat_request.RESPONSE_FORMAT, b"")) > chat_request.LONGEST_WITHOUT_SCHEMA
        longest = exchange.deadline(pipeline.longest_timeout_s)
        options = await off_loop(
            lambda _body: self.take_options(members, form), named.body, exchange, longest, is_slow=has_schema
        )
        deadline = exchange.deadline(pipeline.stream_spec().timeout_s if options.stream else pipeline.timeout_s)
        call = self.inference.call(exchange, pipeline, deadline)
        if any(image.address for image in options.images):
            assert self.downloads is not None
            most = self.limits.of(pipeline).max_body_bytes
            options.images = await downloaded(options.images, self.downloads, exchange, call, most)

        def convert(_largest: memoryview) -> tuple[Sequence[InferenceRequest], TextAnswer]:
            requests = self.requests_of(named, options)
            choices = [self.choice(pipeline, form, request, options, named.name_by_field) for request in requests]
            return requests, TextAnswer(choices, named.model_id, exchange.record.request_id, options)

        largest = max((named.body, *(memoryview(each.content) for each in options.images)), key=len)
        is_slow = has_schema or (options.counter is not None and len(named.body) > COUNTED_AT_ONCE)
        call.requests, call.answer = await off_loop(convert, largest, exchange, deadline, is_slow=is_slow)
        call.problem_of = openai_error_of
        exchange.body_memory = None
        return call, options.stream

    def take_options(self, members: Members, form: TextForm) -> TextOptions:
        """Takes the members that the gateway itself reads. Raises InvalidInput or InvalidJson."""
        stream = take(members, "stream", bool, False)
        has_options = "stream_options" in members
        given = take(members, "stream_options", StreamOptions, StreamOptions())
        if has_options and not stream:
            raise refused([FieldProblem("stream_options", "is only allowed with stream: true")])
        stops: str | list[str] = take(members, "stop", Stop, [])
        options = TextOptions(
            stream=stream,
            include_usage=bool(given.include_usage),
            stops=[stops] if isinstance(stops, str) else stops,
            keeps_stop=KEEPS_STOP in form.field_by_parameter and take(dict(members), KEEPS_STOP, bool, False),
            choices=take(members, "n", Choices, 1),
        )
        if form.tokenizer is not None and (options.include_usage or not stream):
            options.counter = form.tokenizer.count_tokens if form.openai.usage is None else None
            options.reasoning_counter = form.tokenizer.count_tokens if form.reasoning is not None else None
        return options

    @abstractmethod
    def prompt_of(self, named: NamedRequest[TextForm], options: TextOptions) -> tuple[Fields, Mapping[str, Any]]:
        """Returns the prompt and the fields that it needs, and the value of the input for images.

        Completes the options. Raises InvalidInput, InvalidRequest or InvalidJson.
        """

    def requests_of(self, named: NamedRequest[TextForm], options: TextOptions) -> Sequence[InferenceRequest]:
        """Returns a request for each choice. Choices have different seeds if the caller sets one.

        Raises InvalidInput, InvalidRequest or InvalidJson.
        """
        fields, images = self.prompt_of(named, options)
        pipeline, form, members = named.pipeline, named.form, named.members
        names = form.field_by_parameter
        for name in [each for each in members if each not in names and each in form.openai.ignored]:
            del members[name]
        if "max_completion_tokens" in members and "max_completion_tokens" in names:
            members.pop("max_tokens", None)  # the older name of the same limit
        if options.stops and "stop" in names:
            fields[names["stop"]] = msgspec.json.encode(options.stops)
        if options.logprobs is not None and form.openai.logprobs is not None:
            fields[form.openai.logprobs.parameter] = msgspec.json.encode(options.logprobs)
        if form.special_tokens is not None and form.special_tokens not in members:
            fields[form.special_tokens] = b"false"
        if adapter := named.model_id[len(pipeline.name) + 1 :]:
            fields[ADAPTER] = msgspec.json.encode(adapter)
        body = named.body_of(fields, NEUTRAL_OF_TEXTS)
        with openai_names(named.name_by_field):
            values = pipeline.reader.from_json(body, images)
            seed = values.get(names["seed"]) if "seed" in names else None
            if options.choices > 1 and isinstance(seed, int):
                return [pipeline.request_of({**values, names["seed"]: seed + each}) for each in range(options.choices)]
            request = pipeline.request_of(values)
        return [request, *(replace(request, request_id=new_request_id()) for _ in range(options.choices - 1))]


class CompletionsRoute(TextRoute):
    part = "completions"
    operation = "text_completion"
    choice = CompletionChoice

    def take_options(self, members: Members, form: TextForm) -> TextOptions:
        options = super().take_options(members, form)
        options.echo = take(members, "echo", bool, False)
        if form.openai.logprobs is not None:
            options.logprobs = take(members, "logprobs", Logprobs, None)
            if options.echo and options.logprobs is not None:
                problem = "is not allowed with logprobs, because the model has none for the prompt"
                raise refused([FieldProblem("echo", problem)])
        return options

    def prompt_of(self, named: NamedRequest[TextForm], options: TextOptions) -> tuple[Fields, Mapping[str, Any]]:
        prompt = named.members.pop("prompt", None)
        if prompt is None:
            raise required("prompt")
        if options.echo or options.counter is not None:
            given: str | list[str] = take({"prompt": prompt}, "prompt", OneText, "")
            text = given if isinstance(given, str) else given[0]
            options.prompt = text if options.echo else ""
            if options.counter is not None:
                options.prompt_tokens = options.counter(text, add_special_tokens=True)
        named.name_by_field[named.form.prompt] = "prompt"
        return {named.form.prompt: prompt}, {}


class ChatRoute(TextRoute):
    part = operation = "chat"
    choice = ChatChoice

    def __init__(self, inference: Inference, limits: Limits, downloads: ImageDownloads | None) -> None:
        super().__init__(inference, limits)
        self.downloads = downloads

    def take_options(self, members: Members, form: TextForm) -> TextOptions:
        options = super().take_options(members, form)
        if form.openai.logprobs is not None:
            wanted = take(members, "logprobs", bool, False)
            most = take(members, "top_logprobs", Logprobs, 0)
            if most and not wanted:
                raise refused([FieldProblem("top_logprobs", "is only allowed with logprobs: true")])
            options.logprobs = most if wanted else None
        options.messages, options.images = chat_request.take_messages(members, form, self.downloads)
        return options

    def prompt_of(self, named: NamedRequest[TextForm], options: TextOptions) -> tuple[Fields, Mapping[str, Any]]:
        """Renders the messages with the pipeline's chat template."""
        form, names, members = named.form, named.name_by_field, named.members
        assert form.template is not None
        options.tools = tools = chat_request.take_tools(members, form)
        variables = chat_request.take_variables(members, form)
        schema, options.schema = chat_request.take_format(members, form, tools)
        text = form.template.render(options.messages, tools.described, variables)
        contents, options.messages, options.images = [image.content for image in options.images], (), ()
        if options.counter is not None:
            options.prompt_tokens = options.counter(text, add_special_tokens=True)
        if tools.is_required and form.openai.guided is not None:
            options.parser = partial(GuidedParser, tools.callable, is_named=tools.is_named)
        elif not schema or tools.is_required:
            options.parser = partial(parser_of, form.tools, tools.callable, form.reasoning, text[-PROMPT_END:])
        fields: Fields = {form.prompt: memoryview(msgspec.json.encode(text))}
        names[form.prompt] = "messages"
        if form.openai.guided is not None and schema is not None:
            fields |= {name: msgspec.json.encode(value) for name, value in form.guided_fields(schema).items()}
            names[form.openai.guided.parameter] = "tools" if tools.is_required else chat_request.RESPONSE_FORMAT
        if (images := form.images) is None:
            return fields, {}
        is_member = any(field == images.input and name in members for name, field in form.field_by_parameter.items())
        if not contents and (is_member or not images.may_be_empty):
            return fields, {}
        names[images.input] = "messages"
        return fields, {images.input: contents[0] if images.is_single else contents}
