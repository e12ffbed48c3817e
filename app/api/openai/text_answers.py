"""Answers completions and chat completions, whole or as a stream.

``TextRoute`` serves both addresses. ``TextCollector`` and ``ChunkCollector`` collect the choices of an answer. A
``Rendering`` makes the objects of the answer from their texts, finish reasons, log probabilities and token counts.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from msgspec import Meta
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from app.api.call import Inference, InferenceCall
from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.downloads import ImageDownloads
from app.api.endpoint import Found
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.openai.chat_messages import Conversation, take_conversation
from app.api.openai.choice_parts import OpenAIDelta, OpenAIMessage, Piece, delta_of, joined, message_of
from app.api.openai.choices import Choice, OpenAIUsage, tokens_of, usage_of
from app.api.openai.logprobs import chat_logprobs, completion_logprobs
from app.api.openai.openai_errors import openai_error_of
from app.api.openai.requests import (
    NamedRequest,
    Prompt,
    ResponseOptions,
    chat_requests,
    completion_requests,
    counter_of,
    form_of,
    read_named_request,
    take_options,
)
from app.api.responses import send_json
from app.api.streaming import StreamResponse
from app.core.answer import Answer, Ending, Tokens, Values
from app.core.errors import DeadlineExceeded, GatewayError
from app.core.inference import InferenceRequest, InferenceResponse
from app.pipelines.openai_mapping import OpenAIMapping, TextForm
from app.streams.events import Event

FinishReason = Literal["stop", "length", "tool_calls"]
_Index = Annotated[int, Meta(ge=0)]


class _Choice(TypedDict):
    index: _Index
    logprobs: dict[str, Any] | None


class OpenAITextChoice(_Choice):
    text: str
    finish_reason: Literal["stop", "length"]


class OpenAITextChunkChoice(_Choice):
    text: str
    finish_reason: Literal["stop", "length"] | None


class OpenAIChatChoice(_Choice):
    message: OpenAIMessage
    finish_reason: FinishReason


class OpenAIChunkChoice(_Choice):
    delta: OpenAIDelta
    finish_reason: FinishReason | None


class _Answer(TypedDict):
    id: str
    created: _Index
    model: str


class OpenAICompletion(_Answer):
    object: Literal["text_completion"]
    choices: list[OpenAITextChoice]
    usage: NotRequired[OpenAIUsage]


class OpenAICompletionChunk(_Answer):
    object: Literal["text_completion"]
    choices: list[OpenAITextChunkChoice]
    usage: NotRequired[OpenAIUsage | None]


class OpenAIChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[OpenAIChatChoice]
    usage: NotRequired[OpenAIUsage]


class OpenAIChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[OpenAIChunkChoice]
    usage: NotRequired[OpenAIUsage | None]


class Rendering(ABC):
    """Renders one answer, a completion or a chat completion, whole or in chunks.

    Source: the types of OpenAI's Python client. ``usage`` is omitted if the tokens cannot be counted.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, model: str, request_id: str, options: ResponseOptions) -> None:
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_object}
        self._usage = {"usage": None} if options.include_usage else {}
        """Of a chunk that is not the last one."""
        self._top_logprobs = options.logprobs or 0

    def whole(self, pieces: Sequence[Piece], usage: OpenAIUsage | None) -> Values:
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return {
            **self._head,
            "object": self.whole_object,
            "choices": choices,
            **({} if usage is None else {"usage": usage}),
        }

    def chunk(self, index: int, piece: Piece) -> Values:
        return {**self._chunk_head, "choices": [self._chunk_choice(index, piece)], **self._usage}

    def usage_chunks(self, usage: OpenAIUsage | None) -> Sequence[Values]:
        return [{**self._chunk_head, "choices": [], "usage": usage}] if self._usage and usage is not None else []

    @abstractmethod
    def _choice(self, index: int, piece: Piece) -> Values: ...

    @abstractmethod
    def _chunk_choice(self, index: int, piece: Piece) -> Values: ...


class CompletionRendering(Rendering):
    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def _choice(self, index: int, piece: Piece) -> Values:
        logprobs = completion_logprobs(piece.tokens, piece.offset)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    _chunk_choice = _choice


class ChatRendering(Rendering):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, model: str, request_id: str, options: ResponseOptions) -> None:
        super().__init__(model, request_id, options)
        self._begun: set[int] = set()

    def _choice(self, index: int, piece: Piece) -> Values:
        message = message_of(piece)
        logprobs = chat_logprobs(piece.tokens, self._top_logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _chunk_choice(self, index: int, piece: Piece) -> Values:
        """The first chunk of a choice has the role."""
        delta: OpenAIDelta = {} if index in self._begun else {"role": "assistant"}
        if piece.is_read:
            delta |= delta_of(joined([piece]))
        elif piece.text or index not in self._begun:
            delta["content"] = piece.text
        self._begun.add(index)
        logprobs = chat_logprobs(piece.tokens, self._top_logprobs)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}


class ChunkCollector(Answer):
    """The answer of a stream: a chunk for each piece of a text."""

    may_be_slow = True

    def __init__(self, choices: Sequence[Choice], rendering: Rendering) -> None:
        self._choices = choices
        self._rendering = rendering

    @property
    def has_enough(self) -> bool:
        """Whether a stop text was found in every choice."""
        return all(choice.has_stopped for choice in self._choices)

    @property
    def is_behind(self) -> bool:
        return any(choice.is_behind for choice in self._choices)

    def catch_up(self) -> None:
        next(choice for choice in self._choices if choice.is_behind).catch_up()

    @property
    def ends_slowly(self) -> bool:
        return any(choice.ends_slowly for choice in self._choices)

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Collector.add`."""
        piece = self._choices[response.choice].add(response)
        return self._rendering.chunk(response.choice, piece) if piece else None

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`Collector.finish`."""
        chunks = []
        for index, choice in enumerate(self._choices):
            rest, last = choice.finish(error)
            chunks += [self._rendering.chunk(index, piece) for piece in (rest, last) if piece]
        return Ending(self._early_exit, [*chunks, *self._rendering.usage_chunks(usage_of(self.tokens))])

    @property
    def _early_exit(self) -> str | None:
        return next((choice.early_exit for choice in self._choices if choice.early_exit is not None), None)

    @property
    def tokens(self) -> Tokens | None:
        return tokens_of(self._choices)


class TextCollector(ChunkCollector):
    """The answer of a unary request: the whole texts."""

    def __init__(self, choices: Sequence[Choice], rendering: Rendering) -> None:
        super().__init__(choices, rendering)
        self._pieces: list[list[Piece]] = [[] for _ in choices]

    def add(self, response: InferenceResponse) -> None:
        """Raises the errors of :meth:`Collector.add`."""
        piece = self._choices[response.choice].add(response)
        if piece:
            self._pieces[response.choice].append(piece)

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`Collector.finish`."""
        for index, choice in enumerate(self._choices):
            self._pieces[index] += choice.finish(error)
        whole = self._rendering.whole([joined(pieces) for pieces in self._pieces], usage_of(self.tokens))
        return Ending(self._early_exit, [whole])


_FRAME = ServerSentEvent("%b", sep="\n").encode()
_DONE = ServerSentEvent("[DONE]", sep="\n").encode()


class ChunkResponse(StreamResponse):
    """The events of a stream in OpenAI's format: chunks, and ``[DONE]`` or an error at the end."""

    @staticmethod
    def frame_of(event: Event) -> bytes:
        """Events have no ids and names, because OpenAI's clients use neither. An error has the single key ``error``."""
        return _DONE if event.name == "done" else _FRAME % event.data


@dataclass(frozen=True, slots=True)
class Address:
    """The differences between the two addresses."""

    what: str
    operation: str
    """OpenTelemetry's name."""
    form_of: Callable[[OpenAIMapping], TextForm | None]
    requests_of: Callable[
        [NamedRequest, TextForm, ResponseOptions, Conversation], tuple[Prompt, Sequence[InferenceRequest]]
    ]
    rendering: type[Rendering]


COMPLETIONS = Address(
    "completions", "text_completion", lambda form: form.completions, completion_requests, CompletionRendering
)
CHAT = Address("chat completions", "chat", lambda form: form.chat, chat_requests, ChatRendering)


@dataclass(frozen=True, slots=True)
class TextRoute:
    inference: Inference
    limits: Limits
    address: Address
    downloads: ImageDownloads | None = None
    """None if images cannot be given by their addresses."""

    async def post(self, exchange: Exchange, _found: Found) -> Response | None:
        """Sends a whole answer, or returns the response of a stream, which does not keep the request."""
        call, streams = await self._read(exchange)
        if streams:
            exchange.record.transport = "stream"
            with CancelledOnDisconnect(exchange):
                opened = await self.inference.open_stream(call)
            return ChunkResponse.of(*opened, self.limits)
        with CancelledOnDisconnect(exchange):
            ending = await self.inference.answer(call)
        exit_header = [] if ending.early_exit is None else [(b"x-early-exit", ending.early_exit.encode("latin-1"))]
        await send_json(exchange, ending.outputs[0], *exit_header)
        return None

    async def _read(self, exchange: Exchange) -> tuple[InferenceCall, bool]:
        """The call, which keeps no reference to the body, and whether its answer is a stream."""
        address = self.address
        named = await read_named_request(exchange, self.inference, self.limits, address.form_of, address.operation)
        form = form_of(named.pipeline, address.form_of, address.what)
        pipeline = named.pipeline
        longest = deadline_of(exchange, pipeline.longest_timeout_s)
        options, conversation = await named.read(lambda: self._taken(named, form), exchange, longest)
        deadline = deadline_of(exchange, pipeline.stream_spec().timeout_s if options.stream else pipeline.timeout_s)
        call = self.inference.call(exchange, pipeline, deadline)
        if conversation.needs_downloads:
            conversation = await self._downloaded(exchange, call, conversation)

        def read() -> tuple[Sequence[InferenceRequest], ChunkCollector]:
            prompt, requests = address.requests_of(named, form, options, conversation)
            choices = [Choice(pipeline, form, request, options, prompt) for request in requests]
            rendering = address.rendering(named.model_id, exchange.record.request_id, options)
            return requests, (ChunkCollector if options.stream else TextCollector)(choices, rendering)

        counts = counter_of(form, options) is not None
        call.requests, call.answer = await named.read(read, exchange, deadline, conversation.images, counts=counts)
        call.problem_of = openai_error_of
        exchange.forget_body()
        return call, options.stream

    def _taken(self, named: NamedRequest, form: TextForm) -> tuple[ResponseOptions, Conversation]:
        """Takes the members that the gateway itself reads. Raises InvalidInput or InvalidJson."""
        if self.address is not CHAT:
            return take_options(named.members, form, chat=False), Conversation()
        options = take_options(named.members, form, chat=True)
        return options, take_conversation(named.members, form, self.downloads)

    async def _downloaded(self, exchange: Exchange, call: InferenceCall, conversation: Conversation) -> Conversation:
        """Downloads images, whose bytes count as those of the body.

        Raises TooManyRequests if the model is busy, InvalidInput, DeadlineExceeded or ClientClosedRequest.
        """
        call.claim.check(call.deadline)
        size, most = 0, self.limits.of(call.target).max_body_bytes

        def count(piece: int) -> None:
            nonlocal size
            size += piece
            if size > most:
                raise ValueError(f"is too large: the images of a request may have {most} bytes")
            exchange.hold(piece)

        try:
            async with asyncio.timeout(call.deadline.remaining_s()):
                with CancelledOnDisconnect(exchange):
                    return await conversation.downloaded(self.downloads, count)
        except TimeoutError as exc:
            raise DeadlineExceeded("The deadline passed while the images were downloaded.") from exc
