"""Completions and chat completions, whole or as a stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import Send

from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.inference import Call, Inference, Writing
from app.api.limits import Limits
from app.api.openai.asked import Asked, asked_of, form_of
from app.api.openai.collector import TextCollector
from app.api.openai.errors import openai_error_of
from app.api.openai.members import Members
from app.api.openai.rendering import ChatRendering, CompletionRendering, Rendering
from app.api.openai.requests import chat_request, completion_request, take_wishes
from app.api.openai.sse import ChunkResponse
from app.api.responses import send_json
from app.api.streaming import Start
from app.domain.inference import InferenceRequest
from app.pipelines.openai.form import OpenAIForm, TextForm
from app.pipelines.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Address:
    """The differences between the two addresses."""

    what: str
    form_of: Callable[[OpenAIForm], TextForm | None]
    request_of: Callable[[Pipeline, TextForm, Members], InferenceRequest]
    rendering: type[Rendering]


COMPLETIONS = Address("completions", lambda form: form.completions, completion_request, CompletionRendering)
CHAT = Address("chat completions", lambda form: form.chat, chat_request, ChatRendering)


class TextRoute:
    def __init__(self, inference: Inference, limits: Limits, address: Address) -> None:
        self._inference = inference
        self._limits = limits
        self._address = address

    async def post(self, exchange: Exchange, _found: Mapping[str, str], send: Send) -> None:
        response = await self._answered(exchange)
        if response is not None:
            await response(exchange.scope, exchange.receive, send)

    async def _answered(self, exchange: Exchange) -> ChunkResponse | None:
        """Sends a whole answer, or returns the response of a stream, which does not keep the request."""
        read = await self._read(exchange)
        if read.streams:
            return await self._opened(exchange, read)
        call = read.call(exchange, read.pipeline.timeout_s)
        with CancelledOnDisconnect(exchange):
            result = await self._inference.answer(call, read.collector)
        exit_header = [] if result.early_exit is None else [(b"x-early-exit", result.early_exit.encode("latin-1"))]
        await send_json(exchange, result.values, *exit_header)
        return None

    async def _opened(self, exchange: Exchange, read: "_Read") -> ChunkResponse:
        exchange.record.transport = "stream"
        call = read.call(exchange, read.pipeline.stream_spec().timeout_s)
        with CancelledOnDisconnect(exchange):
            stream, opening = await self._inference.open_stream(call, Writing(read.collector, openai_error_of))
        return ChunkResponse(
            stream.log, self._limits, start=Start(events=opening), on_left=stream.end, closing=stream.ended
        )

    async def _read(self, exchange: Exchange) -> "_Read":
        """The result keeps no reference to the body."""
        asked = await asked_of(exchange, self._inference, self._limits, self._address.form_of)
        form = form_of(asked.pipeline, self._address.form_of, self._address.what)
        read = await asked.read(lambda: self._read_members(asked, form, exchange.record.request_id))
        exchange.forget_body()
        return read

    def _read_members(self, asked: Asked, form: TextForm, request_id: str) -> "_Read":
        """Raises InvalidInput, InvalidRequest or InvalidJson."""
        wishes = take_wishes(asked.members, form)
        inference = self._address.request_of(asked.pipeline, form, asked.members)
        rendering = self._address.rendering(asked.pipeline.name, request_id, include_usage=wishes.include_usage)
        collector = TextCollector(asked.pipeline, form, inference, rendering, wishes.stops)
        return _Read(asked.pipeline, inference, collector, wishes.stream)


@dataclass(frozen=True, slots=True)
class _Read:
    """A parsed request."""

    pipeline: Pipeline
    inference: InferenceRequest
    collector: TextCollector
    streams: bool

    def call(self, exchange: Exchange, timeout_s: float) -> Call:
        deadline = deadline_of(exchange, timeout_s)
        return Call(self.pipeline, self.inference, deadline, exchange.record, exchange.caller)
