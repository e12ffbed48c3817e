"""``/v1/streams``: streams that a browser's EventSource can read and resume after a lost connection."""

from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from app.api.bodies import check_size, off_loop, read_json_of_any
from app.api.call import Inference
from app.api.endpoint import Found
from app.api.error_table import ERROR_BY_CODE
from app.api.exchange import CancelledOnDisconnect, Exchange
from app.api.limits import Limits
from app.api.pipelines.answers import StreamStarted
from app.api.request_layer import Layer, once_of
from app.api.responses import JsonResponse
from app.api.streaming import HEADERS, MEDIA_TYPE, RETRY, Start, StreamResponse
from app.codecs.json_scan import malformed, members_of
from app.core.errors import FieldProblem, Forbidden, GatewayError, InvalidInput, InvalidRequest, ResumableStreamsOff
from app.pipelines.body import Body
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import streamed_answer_of
from app.streams.events import Event
from app.streams.store import StartedStream, StreamStore

MAX_ID_DIGITS = 15


class StreamEndpoints:
    """``store``: None if the gateway's processes share no store; then every request gets 501."""

    def __init__(
        self, inference: Inference, store: StreamStore | None, limits: Limits, layers: Sequence[Layer]
    ) -> None:
        self._inference = inference
        self._once_of = once_of(layers)
        self._given_store = store
        self._limits = limits

    @property
    def _store(self) -> StreamStore:
        """Raises ResumableStreamsOff."""
        if self._given_store is None:
            raise ResumableStreamsOff(
                "This gateway has several processes and no Redis to share streams between them.",
                hint="POST /v1/pipelines/{pipeline}/stream works. For resumable streams, set GATEWAY_REDIS_URL.",
            )
        return self._given_store

    async def start_stream(self, exchange: Exchange, _found: Found) -> Response:
        """Start a stream that can be resumed.

        The stream runs without a connection. Read it at the address in `Location`, which needs no key.
        """
        exchange.record.transport = "stream"
        store = self._store
        self._inference.workload.begin(exchange)
        once, body, is_first = self._once_of(exchange), memoryview(b""), False

        async def run() -> StartedStream:
            nonlocal is_first, body
            is_first = True
            self._inference.check_load_of_any(exchange, _timeout_of)
            return await self._started(exchange, store, body or await self._read(exchange))

        if once is None:
            started = await run()
        else:  # the load is checked after the key: a repeated request needs no slot
            body = await self._read(exchange)
            started = await once.start(store, body, run)
        if not is_first:
            exchange.record.transport = None  # the stream counts once
        url = f"/v1/streams/{started.id}"
        answer = StreamStarted(id=started.id, url=url, request_id=started.request_id)
        return JsonResponse(answer, 201, {"Location": url})

    async def _read(self, exchange: Exchange) -> memoryview:
        streamed = (each for each in self._inference.allowed(exchange) if each.spec.stream is not None)
        return await read_json_of_any(exchange, self._limits, streamed)

    async def _started(self, exchange: Exchange, store: StreamStore, body: memoryview) -> StartedStream:
        record = exchange.record
        name, inputs = await off_loop(_members_of, body, exchange)
        pipeline = self._inference.admit(exchange, name, "stream")
        check_size(len(body), self._limits.of(pipeline))
        deadline = exchange.deadline(pipeline.stream_spec().timeout_s)
        inference = await off_loop(pipeline.request_of_json, inputs, exchange, deadline)
        call = self._inference.call(exchange, pipeline, deadline)
        call.requests, call.answer = [inference], streamed_answer_of(pipeline, inference)
        with CancelledOnDisconnect(exchange):
            await store.require_room(record.key)
            slot = await self._inference.take_slot(call)
        stream_id = await self._inference.start_resumable(call, slot, store)
        return StartedStream(stream_id, record.request_id, deadline.remaining_s() + pipeline.stream_terms.resume_s)

    async def read_stream(self, exchange: Exchange, found: Found) -> Response:
        """Read or resume a stream.

        Sends the events after `Last-Event-ID`, those of the past at once. Several readers may read it.
        """
        store, after = self._store, _last_event_id(exchange)
        self._inference.workload.add(exchange)
        await _check_owner(store, found["id"], exchange)
        reader = await store.reader(found["id"], after)
        if reader is None:
            return Response(status_code=204)
        if exchange.scope["method"] == "HEAD":
            await reader.close()
            return Response(headers=HEADERS, media_type=MEDIA_TYPE)
        return _Reading(reader, self._limits, start=Start(after, RETRY), on_left=lambda _: None, closing=reader.close)

    async def delete_stream(self, exchange: Exchange, found: Found) -> Response:
        """End and delete a stream.

        Cancels the work in Triton. The readers of the stream get its terminal event.
        """
        store = self._store
        await _check_owner(store, found["id"], exchange)
        await store.delete(found["id"])
        return Response(status_code=204)


async def _check_owner(store: StreamStore, stream_id: str, exchange: Exchange) -> None:
    """Raises Forbidden if the request has a key, and another key started the stream."""
    key = exchange.key
    if key is not None and await store.caller_of(stream_id) not in {"", key.caller.id}:
        raise Forbidden("Another API key started this stream.", hint="Send the key that started it, or no key.")


class _Reading(StreamResponse):
    """The events of a stream that another request has started, whose record has the error."""

    _error: type[GatewayError] | None = None

    def error_of(self, _exchange: Exchange) -> type[GatewayError] | None:
        return self._error

    def _frames_of(self, events: Sequence[Event]) -> bytes:
        if events and events[-1].name == "error":
            self._error = ERROR_BY_CODE.get(msgspec.json.decode(events[-1].data)["code"])
        return super()._frames_of(events)


def _timeout_of(pipeline: Pipeline) -> float | None:
    return None if pipeline.spec.stream is None else pipeline.spec.stream.timeout_s


def _members_of(body: Body) -> tuple[str, memoryview]:
    """The pipeline's name, and its inputs as JSON. Raises InvalidJson or InvalidInput."""
    members: dict[str, memoryview] = {}
    try:
        for name, text in members_of(memoryview(body)):
            if name in members or name not in {"pipeline", "inputs"}:
                raise _not_a_start()
            members[name] = text
        return msgspec.json.decode(members["pipeline"], type=str), members["inputs"]
    except (msgspec.ValidationError, KeyError, InvalidRequest) as exc:
        raise _not_a_start() from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise malformed() from exc


def _not_a_start() -> InvalidInput:
    needed = FieldProblem("body", 'must be {"pipeline": "<name>", "inputs": {...}}')
    return InvalidInput("The body must name a pipeline and hold its inputs.", errors=[needed])


def _last_event_id(exchange: Exchange) -> int:
    """Returns 0 if the header is missing. Raises InvalidRequest."""
    text = exchange.header(b"last-event-id") or ""
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_ID_DIGITS):
        raise InvalidRequest("Last-Event-ID is not an event id.")
    return int(text)
