"""``/v1/pipelines``: the catalog, unary requests and streams."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from app.api.access import allows_pipeline, check_pipeline
from app.api.deadlines import deadline_of
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange, Header, exchange_of
from app.api.idempotency import idempotency_key_of
from app.api.inference import Call, Inference
from app.api.kept_answers import AnswerKey, KeptAnswer, KeptAnswers, digest_of
from app.api.limits import Limits
from app.api.pipelines.descriptions import describe, summarize
from app.api.pipelines.reading import read_inference
from app.api.pipelines.samples import base_url_of
from app.api.responses import JSON, JsonResponse, send_json
from app.api.routing import Route
from app.api.short_path import ShortRoute
from app.api.streaming import Start, StreamResponse
from app.domain.errors import InvalidRequest
from app.domain.json_text import is_large, json_in_turns, json_of
from app.pipelines.catalog import Catalog
from app.pipelines.collector import Result
from app.pipelines.entry import Entry
from app.pipelines.pipeline import Pipeline


class PipelineRoutes:
    def __init__(self, catalog: Catalog, inference: Inference, limits: Limits) -> None:
        self._catalog = catalog
        self._inference = inference
        self._limits = limits
        self._answers = KeptAnswers()

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/pipelines", route_class=Route)
        router.add_api_route("", self.list_pipelines)
        router.add_api_route("/{name}", self.get_pipeline)
        return router

    def short_routes(self) -> list[ShortRoute]:
        return [
            ShortRoute("/v1/pipelines/{name}", self.run_pipeline),
            ShortRoute("/v1/pipelines/{name}/stream", self.stream_pipeline, transport="stream"),
        ]

    async def list_pipelines(self, request: Request) -> Response:
        key, entries = exchange_of(request).key, self._catalog.entries
        allowed = {name: entry for name, entry in entries.items() if allows_pipeline(key, name)}
        listed = [summarize(name, entry) | self._missing_at(entry) for name, entry in allowed.items()]
        return JsonResponse({"pipelines": listed, "may_explain": self._inference.may_explain(key)})

    async def get_pipeline(self, name: str, request: Request) -> Response:
        exchange = exchange_of(request)
        check_pipeline(exchange, self._catalog, name)
        entry, limits_of = self._catalog.entry(name), self._inference.limits_of
        described = describe(name, entry, limits_of, base_url_of(request), with_key=exchange.key is not None)
        return JsonResponse(described | self._missing_at(entry))

    def _missing_at(self, entry: Entry) -> dict[str, Mapping[str, str]]:
        """The Tritons, of several, that are not called for the pipeline."""
        missing = self._catalog.missing_at(entry)
        return {"missing_at": missing} if missing else {}

    async def run_pipeline(self, exchange: Exchange, found: Mapping[str, str], _send: Send) -> None:
        pipeline = self._inference.admit(exchange, found["name"], "unary")
        key = idempotency_key_of(exchange)
        call = await self._call(exchange, pipeline, pipeline.timeout_s)
        if key is not None and pipeline.spec.idempotent:
            await self._run_once(exchange, call, key)
            return
        with CancelledOnDisconnect(exchange):
            result = await self._inference.answer(call)
        values, headers = _rendered(pipeline, result)
        await send_json(exchange, values, *headers)

    async def _run_once(self, exchange: Exchange, call: Call, key: str) -> None:
        async def run() -> KeptAnswer:
            result = await self._inference.answer(call)
            values, headers = _rendered(call.pipeline, result)
            body = b"".join(await json_in_turns(values)) if is_large(values) else json_of(values)
            return KeptAnswer(body, headers, result.early_exit)

        digest = await asyncio.to_thread(digest_of, call.inference)
        with CancelledOnDisconnect(exchange):
            named = AnswerKey(exchange.record.key, call.pipeline.name, key)
            answer = await self._answers.once(named, digest, call.deadline, run)
        exchange.record.exit_early(answer.early_exit)
        length = (b"content-length", b"%d" % len(answer.body))
        await exchange.answer((JSON, length, *answer.headers), answer.body)

    async def stream_pipeline(self, exchange: Exchange, found: Mapping[str, str], send: Send) -> None:
        pipeline = self._inference.admit(exchange, found["name"], "stream")
        _check_is_start(exchange)
        response = await self._opened(exchange, pipeline)
        await response(exchange.scope, exchange.receive, send)

    async def _opened(self, exchange: Exchange, pipeline: Pipeline) -> StreamResponse:
        call = await self._call(exchange, pipeline, pipeline.stream_spec().timeout_s)
        with CancelledOnDisconnect(exchange):
            stream, opening = await self._inference.open_stream(call)
        return StreamResponse(
            stream.log, self._limits, start=Start(events=opening), on_left=stream.end, closing=stream.ended
        )

    async def _call(self, exchange: Exchange, pipeline: Pipeline, timeout_s: float) -> Call:
        """Starts the deadline, which includes the time to receive the body."""
        deadline = deadline_of(exchange, timeout_s)
        self._inference.check_load(pipeline, exchange.caller, deadline)
        inference = await read_inference(exchange, pipeline, self._limits)
        return Call(pipeline, inference, deadline, exchange.record, exchange.caller)


def _check_is_start(exchange: Exchange) -> None:
    """Raises InvalidRequest for a client that wants to resume: its stream would begin again, with the first event."""
    if exchange.header(b"last-event-id"):
        raise InvalidRequest(
            "This stream cannot be resumed.",
            hint="Start it with POST /v1/streams and read it with GET: that stream resumes after Last-Event-ID.",
        )


def _rendered(pipeline: Pipeline, result: Result) -> tuple[Mapping[str, Any], Sequence[Header]]:
    """The values of the answer, and its own headers."""
    if not pipeline.rules:
        return result.values, ()
    values = {**result.values, "early_exit": result.early_exit}
    return values, () if result.early_exit is None else [(b"x-early-exit", result.early_exit.encode("latin-1"))]
