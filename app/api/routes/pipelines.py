"""``/v1/pipelines``: what there is, one answer, or a stream of outputs."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.bodies import read_inference
from app.api.deadlines import deadline_of
from app.api.descriptions import describe, summarize
from app.api.disconnect import given_up_on_disconnect
from app.api.inference import Call, answer, open_stream
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.api.samples import base_url_of
from app.api.state import gateway_of, record_of
from app.api.streaming import Start, StreamResponse
from app.pipelines.collector import Result
from app.pipelines.pipeline import Pipeline

router = APIRouter(prefix="/v1/pipelines", route_class=Route)


@router.get("")
async def list_pipelines(request: Request) -> Response:
    entries = gateway_of(request).catalog.entries
    return JsonResponse({"pipelines": [summarize(name, entry) for name, entry in entries.items()]})


@router.get("/{name}")
async def get_pipeline(name: str, request: Request) -> Response:
    entry = gateway_of(request).catalog.entry(name)
    return JsonResponse(describe(name, entry, base_url_of(request)))


@router.post("/{name}")
async def run_pipeline(name: str, request: Request) -> Response:
    gateway, record = gateway_of(request), record_of(request)
    pipeline = gateway.admit(request, name, "unary")
    with gateway.counted(name):
        deadline = deadline_of(request, pipeline.timeout_s)
        inference = await read_inference(request, pipeline, gateway.limits)
        async with given_up_on_disconnect(request.receive):
            result = await answer(gateway, Call(pipeline, inference, deadline, record))
    return _result_response(pipeline, result)


@router.post("/{name}/stream")
async def stream_pipeline(name: str, request: Request) -> Response:
    gateway, record = gateway_of(request), record_of(request)
    pipeline = gateway.admit(request, name, "stream")
    spec = pipeline.stream_spec()
    deadline = deadline_of(request, spec.timeout_s)
    inference = await read_inference(request, pipeline, gateway.limits)
    async with given_up_on_disconnect(request.receive):
        stream, opening = await open_stream(gateway, Call(pipeline, inference, deadline, record))
    return StreamResponse(
        stream.log, gateway.limits, start=Start(events=opening), on_left=stream.end, closing=stream.ended
    )


def _result_response(pipeline: Pipeline, result: Result) -> Response:
    if not pipeline.rules:
        return JsonResponse(result.values)
    headers = {} if result.early_exit is None else {"X-Early-Exit": result.early_exit}
    return JsonResponse({**result.values, "early_exit": result.early_exit}, headers=headers)
