"""Serves ``/v1/pipelines``: the catalog, unary requests, streams and examples; also statistics and findings.

``/v1/statistics`` and ``/v1/findings`` tell how the pipelines are doing; the console draws both.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Send

from app.admission.keys import Key
from app.api.access import allows_pipeline, check_pipeline
from app.api.dialect import Dialect, Services, ShortRoute
from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Exchange, exchange_of
from app.api.idempotency import KeptAnswer, KeptAnswers, digest_of, idempotency_key_of
from app.api.inference import InferenceCall
from app.api.pipelines.answers import FindingAnswer, FindingList, describe, summarize
from app.api.pipelines.openapi import described
from app.api.pipelines.reading import check_is_start, read_inference
from app.api.pipelines.results import body_of_values, rendered
from app.api.pipelines.samples import base_url_of
from app.api.pipelines.session_steps import SessionSteps
from app.api.pipelines.sessions import SessionRoutes
from app.api.pipelines.sockets import SocketRoutes
from app.api.pipelines.streams import StreamRoutes
from app.api.responses import JSON, JsonResponse, send_json
from app.api.routing import router_of
from app.api.streaming import StreamResponse
from app.core.aio import Fresh
from app.core.errors import UnknownExample
from app.core.repeats import RepeatKey
from app.core.text import nearest, without_nearest
from app.lint.findings import Finding
from app.observability.statistics import no_requests
from app.pipelines.batches import answer_of, streamed_answer_of
from app.pipelines.catalog import Catalog
from app.pipelines.examples import body_of, declared_requests
from app.pipelines.pipeline import Pipeline

STATISTICS_S = 0.5
"""How long statistics are sent again without reading the metrics, which takes 12 ms for 80 series of ten pipelines."""
FINDINGS_S = 5.0
"""How long findings are sent again without a new check, which asks Triton for every model."""

_log = logging.getLogger(__name__)


class PipelineRoutes:
    def __init__(self, services: Services) -> None:
        self._inference = services.inference
        self._catalog = services.inference.catalog
        self._limits = services.limits
        self._layers = services.layers
        self._answers = KeptAnswers()
        self._statistics = Fresh(services.statistics, STATISTICS_S)
        self._findings = Fresh(services.findings, FINDINGS_S)

    def router(self) -> APIRouter:
        return router_of(
            {
                "/v1/pipelines": self.list_pipelines,
                "/v1/pipelines/{name}": self.get_pipeline,
                "/v1/pipelines/{name}/examples/{example}": self.get_example,
                "/v1/statistics": self.statistics,
                "/v1/findings": self.findings,
            }
        )

    def short_routes(self) -> list[ShortRoute]:
        return [
            ShortRoute("/v1/pipelines/{name}", self.run_pipeline),
            ShortRoute("/v1/pipelines/{name}/stream", self.stream_pipeline, transport="stream"),
        ]

    async def list_pipelines(self, request: Request) -> Response:
        key, catalog = exchange_of(request).key, self._catalog
        catalog.check_known()
        listed = [summarize(catalog, name) for name in catalog.entries if allows_pipeline(key, name)]
        permissions = {layer.permission: layer.allows(key) for layer in self._layers}
        return JsonResponse({"pipelines": listed, **permissions})

    async def get_pipeline(self, name: str, request: Request) -> Response:
        exchange = exchange_of(request)
        check_pipeline(exchange, self._catalog, name)
        base_url, with_key = base_url_of(request), exchange.key is not None
        return JsonResponse(describe(self._catalog, name, self._limits_of, base_url, with_key=with_key))

    def _limits_of(self, pipeline: Pipeline) -> dict[str, Any]:
        return {**self._inference.limits_of(pipeline), "body_bytes": self._limits.of(pipeline).max_body_bytes}

    async def run_pipeline(self, exchange: Exchange, found: Mapping[str, str], _send: Send) -> None:
        pipeline = self._inference.admit(exchange, found["name"], "unary")
        key = idempotency_key_of(exchange)
        call = self._inference.begin(exchange, pipeline, pipeline.timeout_s)
        request = await read_inference(exchange, pipeline, self._limits, call.deadline)
        call.requests, call.answer = [request], answer_of(pipeline, request)
        if key is not None and pipeline.spec.idempotent:
            await self._run_once(exchange, pipeline, call, key)
            return
        with CancelledOnDisconnect(exchange):
            ending = await self._inference.answer(call)
        values, headers = rendered(pipeline, ending)
        await send_json(exchange, values, *headers)

    async def _run_once(self, exchange: Exchange, pipeline: Pipeline, call: InferenceCall, key: str) -> None:
        async def run() -> KeptAnswer:
            ending = await self._inference.answer(call)
            values, headers = rendered(pipeline, ending)
            return KeptAnswer(await body_of_values(values), headers, ending.early_exit)

        digest = await asyncio.to_thread(digest_of, call.requests[0])
        with CancelledOnDisconnect(exchange):
            named = RepeatKey(exchange.record.key, key, digest, pipeline.name)
            answer = await self._answers.once(named, call.deadline, run)
        exchange.record.exit_early(answer.early_exit)
        length = (b"content-length", b"%d" % len(answer.body))
        await exchange.answer((JSON, length, *answer.headers), answer.body)

    async def stream_pipeline(self, exchange: Exchange, found: Mapping[str, str], send: Send) -> None:
        pipeline = self._inference.admit(exchange, found["name"], "stream")
        check_is_start(exchange)
        response = await self._opened(exchange, pipeline)
        await response(exchange.scope, exchange.receive, send)

    async def _opened(self, exchange: Exchange, pipeline: Pipeline) -> StreamResponse:
        call = self._inference.begin(exchange, pipeline, pipeline.stream_spec().timeout_s)
        request = await read_inference(exchange, pipeline, self._limits, call.deadline)
        call.requests, call.answer = [request], streamed_answer_of(pipeline, request)
        with CancelledOnDisconnect(exchange):
            opened = await self._inference.open_stream(call)
        return StreamResponse.of(*opened, self._limits)

    async def get_example(self, name: str, example: str, request: Request) -> Response:
        """Returns a declared request of a pipeline, with its files.

        The answer counts as a body in memory, because it has the size of one.
        """
        exchange = exchange_of(request)
        check_pipeline(exchange, self._catalog, name)
        pipeline = self._catalog.pipeline(name)
        body = await asyncio.to_thread(self._example_body, pipeline, example)
        exchange.hold(len(body))
        return Response(body, media_type="application/json")

    def _example_body(self, pipeline: Pipeline, example: str) -> bytes:
        """Reads the files again each time, so that a changed file needs no reload. Raises UnknownExample."""
        declared, limits = declared_requests(pipeline.spec), self._limits.of(pipeline)
        if example not in declared:
            raise UnknownExample(f"The pipeline has no such example{nearest(example, list(declared))}")
        try:
            body = body_of(pipeline, declared[example], self._catalog.folder, limits.max_body_bytes)
        except (OSError, TypeError, ValueError) as exc:
            _log.warning("the example '%s' of pipeline '%s' cannot be sent: %s", example, pipeline.name, exc)
            raise UnknownExample("A file of this example cannot be read; see the log for the cause.") from exc
        if len(body) > limits.max_body_bytes:
            raise UnknownExample(f"This example is larger than {limits.body_key}, so it cannot be sent.")
        return body

    async def statistics(self, request: Request) -> Response:
        """``time_s`` is for differences only: two answers give the rates between them."""
        key, known = exchange_of(request).key, await self._statistics.current()
        allowed = [name for name in self._catalog.entries if allows_pipeline(key, name)]
        return JsonResponse(
            replace(known, pipelines={name: known.pipelines.get(name) or no_requests() for name in allowed})
        )

    async def findings(self, request: Request) -> Response:
        found, key, file = await self._findings.current(), exchange_of(request).key, self._catalog.file
        view = _View(self._catalog, key, "" if file is None else f"{file.path.parent}/")
        return JsonResponse(FindingList([view.of(finding) for finding in found if view.includes(finding)]))


class _View:
    """What a caller may see of the findings: those about the pipelines of its key, and about their models.

    Texts name gateway.yaml and samples without their ``folder``, because answers contain no paths of the machine.
    For a key with a scope they suggest no names, which may be of other pipelines' models.
    """

    def __init__(self, catalog: Catalog, key: Key | None, folder: str) -> None:
        self._key = None if key is None or key.pipelines is None else key
        self._folder = folder
        entries = [entry for name, entry in catalog.entries.items() if allows_pipeline(key, name)]
        self._models = {entry.spec.model for entry in entries}
        self._models |= {model for entry in entries if entry.pipeline for model in entry.pipeline.graph.models}

    def includes(self, finding: Finding) -> bool:
        if self._key is None:
            return True
        if finding.pipeline is not None:
            return self._key.allows(finding.pipeline)
        return finding.model in self._models

    def of(self, finding: Finding) -> FindingAnswer:
        text = finding.text.replace(self._folder, "") if self._folder else finding.text
        return FindingAnswer(
            severity=finding.severity,
            code=finding.code,
            pipeline=finding.pipeline,
            model=finding.model,
            step=finding.step,
            tensor=finding.tensor,
            text=text if self._key is None else without_nearest(text),
            solution=finding.solution,
        )


def dialect(services: Services) -> Dialect:
    pipelines = PipelineRoutes(services)
    streams = StreamRoutes(services.inference, services.store, services.limits)
    steps = SessionSteps(services.inference, services.share)
    sessions = SessionRoutes(services, steps)
    sockets = SocketRoutes(services.inference, services.limits, services.origins, steps)
    return Dialect(
        routers=[pipelines.router(), streams.router(), sessions.router()],
        bearer_routers=[streams.router_by_id()],
        short_routes=[*pipelines.short_routes(), *sessions.short_routes(), *sockets.short_routes()],
        described=lambda key: described(services.inference.catalog, key),
    )
