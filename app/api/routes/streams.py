"""``/v1/streams``: streams that a browser's own EventSource reads, and resumes after a lost connection."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.bodies import read_body
from app.api.deadlines import deadline_of
from app.api.inference import Call, start_resumable
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.api.sse import HEADERS, MEDIA_TYPE, RETRY
from app.api.state import gateway_of, record_of, work_of
from app.api.streaming import Start, StreamResponse
from app.domain.errors import FieldProblem, InvalidInput, InvalidJson, InvalidRequest, UnsupportedMediaType

router = APIRouter(prefix="/v1/streams", route_class=Route)

MAX_ID_DIGITS = 15


class _Start(msgspec.Struct, forbid_unknown_fields=True):
    pipeline: str
    inputs: msgspec.Raw


@router.post("")
async def start_stream(request: Request) -> Response:
    gateway, record = gateway_of(request), record_of(request)
    record.transport = "stream"
    gateway.begin(request)
    asked = _decoded(request, await read_body(request, gateway.limits))
    pipeline = gateway.admit(request, asked.pipeline, "stream")
    spec = pipeline.stream_spec()
    deadline = deadline_of(request, spec.timeout_s)
    inference = pipeline.request_of_json(bytes(asked.inputs))
    stream_id = await start_resumable(gateway, Call(pipeline, inference, deadline, record))
    url = f"/v1/streams/{stream_id}"
    started = {"id": stream_id, "url": url, "request_id": record.request_id}
    return JsonResponse(started, 201, {"Location": url})


@router.get("/{stream_id}")
async def read_stream(stream_id: str, request: Request) -> Response:
    gateway, after = gateway_of(request), _last_event_id(request)
    gateway.workload.add(work_of(request))
    reader = await gateway.store.reader(stream_id)
    try:
        has_more = await reader.resume(after)
    except BaseException:
        await reader.close()
        raise
    if not has_more or request.method == "HEAD":
        await reader.close()
        return Response(status_code=204) if not has_more else Response(headers=HEADERS, media_type=MEDIA_TYPE)
    return StreamResponse(
        reader, gateway.limits, start=Start(after, RETRY), on_left=lambda _: None, closing=reader.close
    )


@router.delete("/{stream_id}")
async def delete_stream(stream_id: str, request: Request) -> Response:
    await gateway_of(request).store.delete(stream_id)
    return Response(status_code=204)


def _decoded(request: Request, body: bytes) -> _Start:
    """Raises UnsupportedMediaType, InvalidJson or InvalidInput."""
    if "json" not in request.headers.get("content-type", ""):
        raise UnsupportedMediaType(
            "A stream is started with JSON.", hint="With curl, add: -H 'Content-Type: application/json'"
        )
    try:
        return msgspec.json.decode(body, type=_Start)
    except msgspec.ValidationError as exc:
        needed = FieldProblem("body", 'must be {"pipeline": "<name>", "inputs": {...}}')
        raise InvalidInput("The body must name a pipeline and hold its inputs.", errors=[needed]) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidJson("The body is not JSON, or it is nested too deeply.") from exc


def _last_event_id(request: Request) -> int:
    """0 where there is none. Raises InvalidRequest."""
    text = request.headers.get("last-event-id", "")
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_ID_DIGITS):
        raise InvalidRequest("Last-Event-ID is no id of an event.")
    return int(text)
