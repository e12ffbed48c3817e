"""Answers completions and chat completions, whole or as a stream.

``TextRoute`` serves both addresses. ``TextCollector`` and ``ChunkCollector`` collect the responses of a request: the
text up to a stop text, its finish reason and its token count. A ``Rendering`` makes the objects of the answer from
them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sse_starlette import ServerSentEvent
from starlette.types import Send

from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.inference import Inference, InferenceCall
from app.api.limits import Limits
from app.api.openai.errors import openai_error_of, openai_names
from app.api.openai.requests import (
    Members,
    NamedRequest,
    chat_request,
    completion_request,
    form_of,
    read_named_request,
    take_options,
)
from app.api.responses import send_json
from app.api.streaming import StreamResponse
from app.core.answer import Ending, Values
from app.core.errors import GatewayError
from app.core.inference import InferenceRequest, InferenceResponse
from app.pipelines.openai.mapping import OpenAIMapping, TextForm
from app.pipelines.openai.spec import UsageSpec
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import Collector
from app.streams.events import Event

Usage = dict[str, int]


class TokenCount:
    """Counts the tokens of one answer from the tensors that ``usage`` names.

    ``prompt_tokens`` is the value of its tensor; ``completion_tokens`` is the number of elements of its tensor.
    """

    def __init__(self, spec: UsageSpec | None) -> None:
        self._spec = spec
        self._prompt = 0
        self._completion = 0

    def add(self, response: InferenceResponse) -> None:
        if self._spec is None:
            return
        prompt = response.outputs.get(self._spec.prompt_tokens)
        if prompt is not None and prompt.array.size:
            self._prompt = int(prompt.array.flat[0])
        written = response.outputs.get(self._spec.completion_tokens or "")
        if written is not None:
            self._completion += written.array.size

    @property
    def usage(self) -> Usage | None:
        """None if the pipeline does not count tokens."""
        if self._spec is None:
            return None
        total = self._prompt + self._completion
        return {"prompt_tokens": self._prompt, "completion_tokens": self._completion, "total_tokens": total}


class Rendering(ABC):
    """Renders one answer, a completion or a chat completion, whole or in chunks.

    Source: the types of OpenAI's Python client. ``usage`` is omitted if the pipeline does not count tokens.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_name: ClassVar[str] = "prompt"

    def __init__(self, model: str, request_id: str, *, include_usage: bool) -> None:
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def whole(self, text: str, finish_reason: str, usage: Usage | None) -> Values:
        values = self._object(self.whole_object, [self._choice(text, finish_reason)])
        return values if usage is None else {**values, "usage": usage}

    def chunk(self, text: str) -> Values:
        return self._chunk([self._chunk_choice(text, None)])

    def last_chunks(self, finish_reason: str, usage: Usage | None) -> Sequence[Values]:
        last = self._chunk([self._chunk_choice("", finish_reason)])
        return [last, {**self._chunk([]), "usage": usage}] if self._include_usage else [last]

    def _chunk(self, choices: Sequence[Values]) -> Values:
        values = self._object(self.chunk_object, choices)
        return {**values, "usage": None} if self._include_usage else values

    def _object(self, name: str, choices: Sequence[Values]) -> Values:
        return {**self._head, "object": name, "choices": choices}

    @abstractmethod
    def _choice(self, text: str, finish_reason: str) -> Values: ...

    @abstractmethod
    def _chunk_choice(self, text: str, finish_reason: str | None) -> Values: ...


class CompletionRendering(Rendering):
    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def _choice(self, text: str, finish_reason: str | None) -> Values:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}

    _chunk_choice = _choice


class ChatRendering(Rendering):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    prompt_name = "messages"
    _has_begun = False

    def _choice(self, text: str, finish_reason: str) -> Values:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def _chunk_choice(self, text: str, finish_reason: str | None) -> Values:
        """The first chunk has the role."""
        delta = {} if self._has_begun else {"role": "assistant"}
        if text or not self._has_begun:
            delta["content"] = text
        self._has_begun = True
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class StopMatcher:
    """Ends a text before the caller's first stop text, for any division of the text into pieces.

    If several stop texts end at the same place, the longest one counts. Keeps text that may be the beginning of a stop
    text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.has_stopped = False

    def add(self, piece: str) -> str:
        """Returns the text that cannot be part of a stop text; empty after a stop text."""
        if not self._stops or self.has_stopped:
            return "" if self.has_stopped else piece
        text = self._held + piece
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        if found:
            self.has_stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - self._length_in_doubt(text)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Returns the kept text after the last piece."""
        held, self._held = self._held, ""
        return held

    def _length_in_doubt(self, text: str) -> int:
        """The length of the longest suffix of the text that is a prefix of a stop text."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        lengths = (length for length in range(longest, 0, -1) if self._could_begin(text[-length:]))
        return next(lengths, 0)

    def _could_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


class ChunkCollector:
    """The answer of a stream: a chunk for each piece of the text. Implements :class:`app.core.answer.Answer`.

    The pipeline's own collector checks the contract and detects early exits, which become an empty text here.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        form: TextForm,
        request: InferenceRequest,
        rendering: Rendering,
        stops: Sequence[str] = (),
    ) -> None:
        self._form = form
        self._collector = Collector(pipeline, request)
        self._rendering = rendering
        self._matcher = StopMatcher(stops)
        self._count = TokenCount(form.usage)
        self._finish_reason = "stop"
        self._texts: list[str] = []

    @property
    def has_enough(self) -> bool:
        """Whether a stop text was found."""
        return self._matcher.has_stopped

    def add(self, response: InferenceResponse) -> Values | None:
        """Raises the errors of :meth:`Collector.add`."""
        text = self._text_of(response)
        return self._rendering.chunk(text) if text else None

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`Collector.finish`."""
        text, early_exit = self._rest(error)
        chunks = [self._rendering.chunk(text)] if text else []
        return Ending(early_exit, [*chunks, *self._rendering.last_chunks(self._finish_reason, self._count.usage)])

    def _text_of(self, response: InferenceResponse) -> str:
        self._count.add(response)
        values = self._collector.add(response)
        return "" if values is None else self._matcher.add(self._read(values))

    def _rest(self, error: GatewayError | None) -> tuple[str, str | None]:
        """The end of the text, and the reason of an early exit."""
        if self._matcher.has_stopped:
            self._finish_reason = "stop"
            return "", None
        with openai_names({self._rendering.prompt_name: self._form.prompt, **self._form.field_by_parameter}):
            ending = self._collector.finish(error)
        pieces = [self._matcher.add(self._read(values)) for values in ending.outputs]
        return "".join([*pieces, self._matcher.rest()]), ending.early_exit

    def _read(self, values: Values) -> str:
        if self._form.finish_reason is not None and values[self._form.finish_reason]:
            self._finish_reason = "length" if values[self._form.finish_reason] == "length" else "stop"
        return values[self._form.text] or ""


class TextCollector(ChunkCollector):
    """The answer of a unary request: the whole text."""

    def add(self, response: InferenceResponse) -> None:
        """Raises the errors of :meth:`Collector.add`."""
        self._texts.append(self._text_of(response))

    def finish(self, error: GatewayError | None = None) -> Ending:
        """Raises the errors of :meth:`Collector.finish`."""
        text, early_exit = self._rest(error)
        whole = "".join([*self._texts, text])
        return Ending(early_exit, [self._rendering.whole(whole, self._finish_reason, self._count.usage)])


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
    form_of: Callable[[OpenAIMapping], TextForm | None]
    request_of: Callable[[Pipeline, TextForm, Members], InferenceRequest]
    rendering: type[Rendering]


COMPLETIONS = Address("completions", lambda form: form.completions, completion_request, CompletionRendering)
CHAT = Address("chat completions", lambda form: form.chat, chat_request, ChatRendering)


@dataclass(frozen=True, slots=True)
class TextRoute:
    inference: Inference
    limits: Limits
    address: Address

    async def post(self, exchange: Exchange, _found: Mapping[str, str], send: Send) -> None:
        response = await self._answered(exchange)
        if response is not None:
            await response(exchange.scope, exchange.receive, send)

    async def _answered(self, exchange: Exchange) -> ChunkResponse | None:
        """Sends a whole answer, or returns the response of a stream, which does not keep the request."""
        read = await self._read(exchange)
        if read.streams:
            return await self._opened(exchange, read)
        call = self._call(exchange, read, read.pipeline.timeout_s)
        with CancelledOnDisconnect(exchange):
            ending = await self.inference.answer(call)
        exit_header = [] if ending.early_exit is None else [(b"x-early-exit", ending.early_exit.encode("latin-1"))]
        await send_json(exchange, ending.outputs[0], *exit_header)
        return None

    async def _opened(self, exchange: Exchange, read: "_Read") -> ChunkResponse:
        exchange.record.transport = "stream"
        call = self._call(exchange, read, read.pipeline.stream_spec().timeout_s)
        with CancelledOnDisconnect(exchange):
            stream, opening = await self.inference.open_stream(call)
        return ChunkResponse.of(stream, opening, self.limits)

    def _call(self, exchange: Exchange, read: "_Read", timeout_s: float) -> InferenceCall:
        target, deadline = self.inference.target_of(read.pipeline), deadline_of(exchange, timeout_s)
        collector, record = read.collector, exchange.record
        return InferenceCall(target, read.inference, collector, deadline, record, exchange.caller, openai_error_of)

    async def _read(self, exchange: Exchange) -> "_Read":
        """The result keeps no reference to the body."""
        named = await read_named_request(exchange, self.inference, self.limits, self.address.form_of)
        form = form_of(named.pipeline, self.address.form_of, self.address.what)
        read = await named.read(lambda: self._read_members(named, form, exchange.record.request_id))
        exchange.forget_body()
        return read

    def _read_members(self, named: NamedRequest, form: TextForm, request_id: str) -> "_Read":
        """Raises InvalidInput, InvalidRequest or InvalidJson."""
        options = take_options(named.members, form)
        inference = self.address.request_of(named.pipeline, form, named.members)
        rendering = self.address.rendering(named.pipeline.name, request_id, include_usage=options.include_usage)
        kind = ChunkCollector if options.stream else TextCollector
        collector = kind(named.pipeline, form, inference, rendering, options.stops)
        return _Read(named.pipeline, inference, collector, options.stream)


@dataclass(frozen=True, slots=True)
class _Read:
    """A parsed request."""

    pipeline: Pipeline
    inference: InferenceRequest
    collector: ChunkCollector
    streams: bool
