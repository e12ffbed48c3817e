"""Completions and chat completions, whole or as a stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import Send

from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange
from app.api.inference import Call, Inference, Writing
from app.api.limits import Limits
from app.api.openai.asked import asked_of, form_of
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
    """What the two addresses do not share."""

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
        asked = await asked_of(exchange, self._inference, self._limits)
        pipeline, members = asked.pipeline, asked.members
        form = form_of(pipeline, self._address.form_of, self._address.what)
        wishes = await asked.read(lambda: take_wishes(members, form))
        inference = await asked.read(lambda: self._address.request_of(pipeline, form, members))
        del asked
        exchange.forget_body()
        rendering = self._address.rendering(
            pipeline.name, exchange.record.request_id, include_usage=wishes.include_usage
        )
        collector = TextCollector(pipeline, form, inference, rendering, wishes.stops)
        if wishes.stream:
            await self._stream(exchange, send, pipeline, inference, collector)
        else:
            await self._answer(exchange, pipeline, inference, collector)

    async def _answer(
        self, exchange: Exchange, pipeline: Pipeline, inference: InferenceRequest, collector: TextCollector
    ) -> None:
        call = Call(pipeline, inference, deadline_of(exchange, pipeline.timeout_s), exchange.record)
        with self._inference.counted(pipeline.name), CancelledOnDisconnect(exchange):
            result = await self._inference.answer(call, collector)
        exit_header = [] if result.early_exit is None else [(b"x-early-exit", result.early_exit.encode("latin-1"))]
        await send_json(exchange, result.values, *exit_header)

    async def _stream(
        self,
        exchange: Exchange,
        send: Send,
        pipeline: Pipeline,
        inference: InferenceRequest,
        collector: TextCollector,
    ) -> None:
        exchange.record.transport = "stream"
        call = Call(pipeline, inference, deadline_of(exchange, pipeline.stream_spec().timeout_s), exchange.record)
        with CancelledOnDisconnect(exchange):
            stream, opening = await self._inference.open_stream(call, Writing(collector, openai_error_of))
        response = ChunkResponse(
            stream.log, self._limits, start=Start(events=opening), on_left=stream.end, closing=stream.ended
        )
        await response(exchange.scope, exchange.receive, send)
