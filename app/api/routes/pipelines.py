"""``/v1/pipelines``: what there is, one answer, or a stream of outputs."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.bodies import read_inference
from app.api.deadlines import deadline_of
from app.api.descriptions import describe, summarize
from app.api.disconnect import cancelled_on_disconnect
from app.api.inference import Call, Inference
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.api.samples import base_url_of
from app.api.state import Limits, record_of
from app.api.streaming import Start, StreamResponse
from app.pipelines.catalog import Catalog
from app.pipelines.collector import Result
from app.pipelines.pipeline import Pipeline


class PipelineRoutes:
    def __init__(self, catalog: Catalog, inference: Inference, limits: Limits) -> None:
        self._catalog = catalog
        self._inference = inference
        self._limits = limits

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/pipelines", route_class=Route)
        router.add_api_route("", self.list_pipelines)
        router.add_api_route("/{name}", self.get_pipeline)
        router.add_api_route("/{name}", self.run_pipeline, methods=["POST"])
        router.add_api_route("/{name}/stream", self.stream_pipeline, methods=["POST"])
        return router

    async def list_pipelines(self, _request: Request) -> Response:
        entries = self._catalog.entries
        return JsonResponse({"pipelines": [summarize(name, entry) for name, entry in entries.items()]})

    async def get_pipeline(self, name: str, request: Request) -> Response:
        return JsonResponse(describe(name, self._catalog.entry(name), base_url_of(request)))

    async def run_pipeline(self, name: str, request: Request) -> Response:
        pipeline = self._inference.admit(request, name, "unary")
        with self._inference.counted(name):
            call = await self._call(request, pipeline, pipeline.timeout_s)
            async with cancelled_on_disconnect(request.receive):
                result = await self._inference.answer(call)
        return _result_response(pipeline, result)

    async def stream_pipeline(self, name: str, request: Request) -> Response:
        pipeline = self._inference.admit(request, name, "stream")
        call = await self._call(request, pipeline, pipeline.stream_spec().timeout_s)
        async with cancelled_on_disconnect(request.receive):
            stream, opening = await self._inference.open_stream(call)
        return StreamResponse(
            stream.log, self._limits, start=Start(events=opening), on_left=stream.end, closing=stream.ended
        )

    async def _call(self, request: Request, pipeline: Pipeline, timeout_s: float) -> Call:
        """The deadline runs from here: the time that the body takes counts."""
        deadline = deadline_of(request, timeout_s)
        return Call(pipeline, await read_inference(request, pipeline, self._limits), deadline, record_of(request))


def _result_response(pipeline: Pipeline, result: Result) -> Response:
    if not pipeline.rules:
        return JsonResponse(result.values)
    headers = {} if result.early_exit is None else {"X-Early-Exit": result.early_exit}
    return JsonResponse({**result.values, "early_exit": result.early_exit}, headers=headers)
