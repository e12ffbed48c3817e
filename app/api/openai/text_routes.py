"""``/v1/completions`` and ``/v1/chat/completions``: members of a body become requests for each choice of the answer."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response

from app.api.bodies import Limits
from app.api.call import Inference, InferenceCall
from app.api.downloads import ImageDownloads
from app.api.endpoint import Found
from app.api.exchange import Exchange
from app.api.openai.chat_messages import Conversation, take_conversation
from app.api.openai.choices import Choice, TextOptions
from app.api.openai.members import NEUTRAL_OF_TEXTS, Members, required, take
from app.api.openai.openai_errors import openai_error_of, openai_names
from app.api.openai.requests import Door, NamedRequest
from app.api.openai.response_format import FIELD as RESPONSE_FORMAT
from app.api.openai.response_format import LONGEST_WITHOUT_SCHEMA, take_format
from app.api.openai.text_answers import ChatAnswer, ChunkResponse, CompletionAnswer, TextAnswer
from app.api.openai.tools import take_tools, take_variables
from app.core.errors import FieldProblem
from app.core.inference import InferenceRequest, new_request_id
from app.llm.answer_formats import PROMPT_END, parser_of
from app.llm.tokenizer import COUNTED_AT_ONCE
from app.llm.tool_calls import GuidedParser
from app.pipelines.body import Body, refused
from app.pipelines.openai_mapping import OpenAIMapping, TextForm
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
Requests = Sequence[InferenceRequest]


class TextRoute(Door[TextForm]):
    neutral = NEUTRAL_OF_TEXTS
    answer: ClassVar[type[TextAnswer]]
    downloads: ImageDownloads | None = None
    """None if images cannot be given by their addresses."""

    async def post(self, exchange: Exchange, _found: Found) -> Response | None:
        """Sends a whole answer, or returns the response of a stream, which does not keep the request."""
        call, streams = await self._read(exchange)
        if streams:
            exchange.record.transport = "stream"
            with exchange.cancelled_on_disconnect():
                opened = await self.inference.open_stream(call)
            return ChunkResponse.of(*opened, self.limits)
        with exchange.cancelled_on_disconnect():
            ending = await self.inference.answer(call)
        exit_header = [] if ending.early_exit is None else [(b"x-early-exit", ending.early_exit.encode("latin-1"))]
        await exchange.send_json(ending.outputs[0], *exit_header)
        return None

    async def _read(self, exchange: Exchange) -> tuple[InferenceCall, bool]:
        """The call, which keeps no reference to the body, and whether its answer is a stream."""
        named = await self.open(exchange)
        pipeline, form = named.pipeline, named.form
        has_schema = len(named.members.get(RESPONSE_FORMAT, b"")) > LONGEST_WITHOUT_SCHEMA

        def take_first() -> tuple[TextOptions, Conversation]:
            options = self.take_options(named.members, form)
            return options, self.take_conversation(named)

        longest = exchange.deadline(pipeline.longest_timeout_s)
        options, conversation = await named.read(take_first, longest, is_slow=has_schema)
        deadline = exchange.deadline(pipeline.stream_spec().timeout_s if options.stream else pipeline.timeout_s)
        call = self.inference.call(exchange, pipeline, deadline)
        if any(image.address for image in conversation.images):
            assert self.downloads is not None
            most = self.limits.of(pipeline).max_body_bytes
            conversation = await conversation.downloaded(self.downloads, exchange, call, most)

        def convert() -> tuple[Requests, TextAnswer]:
            requests = self.requests_of(named, options, conversation)
            choices = [Choice(pipeline, form, request, options, named.name_by_field) for request in requests]
            return requests, self.answer(choices, named.model_id, exchange.record.request_id, options)

        images = [image.content for image in conversation.images]
        is_slow = has_schema or (options.counter is not None and len(named.body) > COUNTED_AT_ONCE)
        call.requests, call.answer = await named.read(convert, deadline, images, is_slow=is_slow)
        call.problem_of = openai_error_of
        exchange.forget_body()
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
            options.counter = form.tokenizer.count_tokens if form.usage is None else None
            options.reasoning_counter = form.tokenizer.count_tokens if form.reasoning is not None else None
        return options

    def take_conversation(self, named: NamedRequest[TextForm]) -> Conversation:
        """The messages of a chat. Raises InvalidInput or InvalidJson."""
        return Conversation()

    @abstractmethod
    def requests_of(self, named: NamedRequest[TextForm], options: TextOptions, conversation: Conversation) -> Requests:
        """Returns a request for each choice, and completes the options.

        Raises InvalidInput, InvalidRequest or InvalidJson.
        """


class CompletionsRoute(TextRoute):
    what = "completions"
    operation = "text_completion"
    answer = CompletionAnswer

    @staticmethod
    def form_of(openai: OpenAIMapping) -> TextForm | None:
        return openai.completions

    def take_options(self, members: Members, form: TextForm) -> TextOptions:
        options = super().take_options(members, form)
        options.echo = take(members, "echo", bool, False)
        if form.logprobs is not None:
            options.logprobs = take(members, "logprobs", Logprobs, None)
            if options.echo and options.logprobs is not None:
                problem = "is not allowed with logprobs, because the model has none for the prompt"
                raise refused([FieldProblem("echo", problem)])
        return options

    def requests_of(self, named: NamedRequest[TextForm], options: TextOptions, conversation: Conversation) -> Requests:
        prompt = named.members.pop("prompt", None)
        if prompt is None:
            raise required("prompt")
        if options.echo or options.counter is not None:
            given: str | list[str] = take({"prompt": prompt}, "prompt", OneText, "")
            text = given if isinstance(given, str) else given[0]
            options.prompt = text if options.echo else ""
            options.count_prompt(text)
        named.name_by_field[named.form.prompt] = "prompt"
        return _requests_of(named, options, {named.form.prompt: prompt})


class ChatRoute(TextRoute):
    what = "chat completions"
    operation = "chat"
    answer = ChatAnswer

    def __init__(self, inference: Inference, limits: Limits, downloads: ImageDownloads | None) -> None:
        super().__init__(inference, limits)
        self.downloads = downloads

    @staticmethod
    def form_of(openai: OpenAIMapping) -> TextForm | None:
        return openai.chat

    def take_options(self, members: Members, form: TextForm) -> TextOptions:
        options = super().take_options(members, form)
        if form.logprobs is not None:
            wanted = take(members, "logprobs", bool, False)
            most = take(members, "top_logprobs", Logprobs, 0)
            if most and not wanted:
                raise refused([FieldProblem("top_logprobs", "is only allowed with logprobs: true")])
            options.logprobs = most if wanted else None
        return options

    def take_conversation(self, named: NamedRequest[TextForm]) -> Conversation:
        return take_conversation(named.members, named.form, self.downloads)

    def requests_of(self, named: NamedRequest[TextForm], options: TextOptions, conversation: Conversation) -> Requests:
        """Renders the messages to the prompt with the pipeline's chat template."""
        form, names, members = named.form, named.name_by_field, named.members
        assert form.template is not None
        options.tools = tools = take_tools(members, form)
        variables = take_variables(members, form)
        guided, options.schema = take_format(members, form, tools)
        schema = tools.schema if guided is None else guided
        text = form.template.render(conversation.messages, tools.described, variables)
        conversation.messages.clear()  # frees the memory before the requests are made
        options.count_prompt(text)
        if tools.is_required and form.guided is not None:
            options.parser = partial(GuidedParser, tools.callable, is_named=tools.is_named)
        elif not guided:
            options.parser = partial(parser_of, form.tools, tools.callable, form.reasoning, text[-PROMPT_END:])
        fields: dict[str, Body] = {form.prompt: memoryview(msgspec.json.encode(text))}
        del text  # frees its memory too
        names[form.prompt] = "messages"
        if form.guided is not None and schema is not None:
            fields |= {name: msgspec.json.encode(value) for name, value in form.guided_fields(schema).items()}
            names[form.guided.parameter] = "tools" if guided is None else RESPONSE_FORMAT
        return _requests_of(named, options, fields, _images_of(conversation, form, members, names))


def _images_of(
    conversation: Conversation, form: TextForm, members: Members, names: dict[str, str]
) -> Mapping[str, Any]:
    """Returns the value of the pipeline's input for images; nothing if it is absent, or a member of its own."""
    contents, images = [image.content for image in conversation.images], form.images
    if images is None:
        return {}
    is_member = any(field == images.input and name in members for name, field in form.field_by_parameter.items())
    if not contents and (is_member or not images.may_be_empty):
        return {}
    names[images.input] = "messages"
    return {images.input: contents[0] if images.is_single else contents}


def _requests_of(
    named: NamedRequest[TextForm], options: TextOptions, fields: dict[str, Body], images: Mapping[str, Any] = {}
) -> Requests:
    """Returns a request for each choice. Choices have different seeds if the caller sets one."""
    pipeline, form, members = named.pipeline, named.form, named.members
    names = form.field_by_parameter
    for name in [each for each in members if each not in names and each in form.ignored]:
        del members[name]
    if "max_completion_tokens" in members and "max_completion_tokens" in names:
        members.pop("max_tokens", None)  # the older name of the same limit
    if options.stops and "stop" in names:
        fields[names["stop"]] = msgspec.json.encode(options.stops)
    if options.logprobs is not None and form.logprobs is not None:
        fields[form.logprobs.parameter] = msgspec.json.encode(options.logprobs)
    if form.special_tokens is not None and form.special_tokens not in members:
        fields[form.special_tokens] = b"false"
    if adapter := named.model_id[len(pipeline.name) + 1 :]:
        fields[ADAPTER] = msgspec.json.encode(adapter)
    body = named.body_of(fields)
    with openai_names(named.name_by_field):
        values = pipeline.reader.from_json(body, images)
        seed = values.get(names["seed"]) if "seed" in names else None
        if options.choices > 1 and isinstance(seed, int):
            return [pipeline.request_of({**values, names["seed"]: seed + each}) for each in range(options.choices)]
        request = pipeline.request_of(values)
    return [request, *(replace(request, request_id=new_request_id()) for _ in range(options.choices - 1))]
