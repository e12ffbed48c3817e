"""Serves ``/v1/pipelines``: the catalog, unary requests, streams and examples; also statistics and findings.

``/v1/statistics`` and ``/v1/findings`` tell how the pipelines are doing; the console draws both.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response

from app.admission.keys import Key
from app.api.access import allows_pipeline, check_pipeline
from app.api.call import Inference, InferenceCall
from app.api.endpoint import Found
from app.api.exchange import CancelledOnDisconnect, Exchange
from app.api.limits import Limits
from app.api.pipelines.answers import FindingAnswer, FindingList, describe, summarize
from app.api.pipelines.reading import check_is_start, read_inference
from app.api.pipelines.results import body_of_values, rendered
from app.api.pipelines.samples import base_url_of, samples_of
from app.api.request_layer import KeptAnswer, Layer, Once, once_of
from app.api.responses import JSON, JsonResponse, send_json
from app.api.streaming import StreamResponse
from app.core.aio import Fresh
from app.core.errors import UnknownExample
from app.core.text import nearest, without_nearest
from app.lint.findings import Finding
from app.observability.statistics import Statistics, no_requests
from app.pipelines.catalog import Catalog
from app.pipelines.examples import body_of, declared_requests
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import answer_of, streamed_answer_of

STATISTICS_S = 0.5
"""How long statistics are sent again without reading the metrics, which takes 12 ms for 80 series of ten pipelines."""
FINDINGS_S = 5.0
"""How long findings are sent again without a new check, which asks Triton for every model."""

_log = logging.getLogger(__name__)


class PipelineEndpoints:
    """``statistics``: of all processes. ``findings``: what the linter finds now; raises GatewayError."""

    def __init__(
        self,
        inference: Inference,
        limits: Limits,
        layers: Sequence[Layer],
        statistics: Callable[[], Awaitable[Statistics]],
        findings: Callable[[], Awaitable[Sequence[Finding]]],
    ) -> None:
        self._inference = inference
        self._catalog = inference.catalog
        self._limits = limits
        self._layers = layers
        self._once_of = once_of(layers)
        self._statistics = Fresh(statistics, STATISTICS_S)
        self._findings = Fresh(findings, FINDINGS_S)

    async def list_pipelines(self, exchange: Exchange, _found: Found) -> Response:
        """The pipelines.

        The pipelines that the caller may use, with their states, ready or not.
        """
        key, catalog = exchange.key, self._catalog
        catalog.check_known()
        listed = [
            self._flagged(name, summarize(catalog, name)) for name in catalog.entries if allows_pipeline(key, name)
        ]
        flags = {name: value for layer in self._layers for name, value in layer.flags_for(key).items()}
        return JsonResponse({"pipelines": listed, **flags})

    async def get_pipeline(self, exchange: Exchange, found: Found) -> Response:
        """Fields, types, limits, graph and samples.

        What a form or a program needs to call the pipeline, with samples that work as pasted.
        """
        name = found["name"]
        check_pipeline(exchange, self._catalog, name)
        base_url, with_key = base_url_of(exchange), exchange.key is not None

        def samples(pipeline: Pipeline) -> dict[str, str]:
            of_layers = (layer.samples_of(pipeline, base_url, with_key=with_key) for layer in self._layers)
            return next(filter(None, of_layers), None) or samples_of(pipeline, base_url, with_key=with_key)

        return JsonResponse(self._flagged(name, describe(self._catalog, name, self._limits_of, samples)))

    def _flagged(self, name: str, described: Struct) -> dict[str, Any]:
        """Adds what the layers tell of a pipeline."""
        members: dict[str, Any] = msgspec.to_builtins(described)
        for layer in self._layers:
            members |= layer.flags_of(self._catalog.entry(name).spec)
        return members

    def _limits_of(self, pipeline: Pipeline) -> dict[str, Any]:
        return {**self._inference.limits_of(pipeline), "body_bytes": self._limits.of(pipeline).max_body_bytes}

    async def run_pipeline(self, exchange: Exchange, found: Found) -> None:
        """Run a pipeline.

        Answers when the model has sent all of its responses. A request with a file may be a form, and a request of one
        file may be its bytes.
        """
        pipeline = self._inference.admit(exchange, found["name"], "unary")
        once = self._once_of(exchange)
        call = self._inference.begin(exchange, pipeline, pipeline.timeout_s)
        request = await read_inference(exchange, pipeline, self._limits, call.deadline)
        call.requests, call.answer = [request], answer_of(pipeline, request)
        if once is not None and pipeline.spec.idempotent:
            await self._run_once(exchange, pipeline, call, once)
            return
        with CancelledOnDisconnect(exchange):
            ending = await self._inference.answer(call)
        values, headers = rendered(pipeline, ending)
        await send_json(exchange, values, *headers)

    async def _run_once(self, exchange: Exchange, pipeline: Pipeline, call: InferenceCall, once: Once) -> None:
        async def run() -> KeptAnswer:
            ending = await self._inference.answer(call)
            values, headers = rendered(pipeline, ending)
            return KeptAnswer(await body_of_values(values), headers, ending.early_exit)

        answer = await once.answer(pipeline.name, call.requests[0], call.deadline, run)
        exchange.record.exit_early(answer.early_exit)
        length = (b"content-length", b"%d" % len(answer.body))
        await exchange.answer((JSON, length, *answer.headers), answer.body)

    async def stream_pipeline(self, exchange: Exchange, found: Found) -> Response:
        """Run a pipeline as a stream.

        Sends each response of the model as an event. The stream depends on this connection: a repeated request with
        `Last-Event-ID` gets 400. `POST /v1/streams` starts streams that can be resumed.
        """
        pipeline = self._inference.admit(exchange, found["name"], "stream")
        check_is_start(exchange)
        call = self._inference.begin(exchange, pipeline, pipeline.stream_spec().timeout_s)
        request = await read_inference(exchange, pipeline, self._limits, call.deadline)
        call.requests, call.answer = [request], streamed_answer_of(pipeline, request)
        with CancelledOnDisconnect(exchange):
            opened = await self._inference.open_stream(call)
        return StreamResponse.of(*opened, self._limits)

    async def get_example(self, exchange: Exchange, found: Found) -> Response:
        """An example of a request.

        The answer is the body of a valid request, with the content of its files in base64.
        """
        name = found["name"]
        check_pipeline(exchange, self._catalog, name)
        pipeline = self._catalog.pipeline(name)
        body = await asyncio.to_thread(self._example_body, pipeline, found["example"])
        exchange.hold(len(body))  # it has the size of a body
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

    async def statistics(self, exchange: Exchange, _found: Found) -> Response:
        """Requests and durations of each pipeline.

        Counters since the start of the gateway, summed over its processes. Subtract two answers for rates.
        """
        key, known = exchange.key, await self._statistics.current()
        allowed = [name for name in self._catalog.entries if allows_pipeline(key, name)]
        return JsonResponse(
            replace(known, pipelines={name: known.pipelines.get(name) or no_requests() for name in allowed})
        )

    async def findings(self, exchange: Exchange, _found: Found) -> Response:
        """What `triton-gateway check` finds in the models.

        Mistakes in the running models and in gateway.yaml, each with its solution.
        """
        found, key, file = await self._findings.current(), exchange.key, self._catalog.file
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
