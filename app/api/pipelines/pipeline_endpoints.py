"""Runs pipelines: whole answers, streams, streams that can be resumed, and WebSockets.

A request is JSON, a form with files as parts, or the raw bytes of the pipeline's only file, with the parameters in the
query string.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypedDict

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response

from app.admission.keys import ANYONE, Key
from app.api import bodies
from app.api.call import Inference
from app.api.endpoint import Found, Layer, check_socket_origin
from app.api.exchange import JSON, Exchange, JsonResponse, check_pipeline
from app.api.streaming import TRANSPORT, MessageHandler, Reply, ResumedResponse, Socket, StreamResponse, handshake
from app.codecs.json_scan import malformed, members_of
from app.codecs.kinds import FILE_TYPES, check_media_type, is_file_type
from app.core import errors
from app.core.answer import Ending, WholeAnswer
from app.core.inference import BYTES, ELEMENT, Deadline, InferenceRequest
from app.core.json import is_large, json_in_turns, json_of
from app.http1.websocket import Message, SocketTerms
from app.observability.record import RequestRecord
from app.pipelines.fields import InputField
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import answer_of
from app.streams.store import StartedStream, StreamStore
from app.streams.stream import STALL_S

NO_FILE = "Send application/json: no input of this pipeline is a file."
FILE_TYPE_HINT = f"{bodies.JSON_HINT}, or -H 'Content-Type: application/octet-stream' for a file"
FILE_HINT = "If an input is a file, declare `kind: image` or `kind: binary` for the input in gateway.yaml."
_EVENT_ID = re.compile("[0-9]{1,15}")


class StreamStarted(TypedDict):
    id: str
    url: str
    request_id: str


@dataclass(eq=False)
class PipelineEndpoints:
    """``store``: None if the gateway's processes share no store; then every request to a resumable stream gets 501.

    ``origins``: of the pages of other sites that may open a WebSocket.
    """

    inference: Inference
    limits: bodies.Limits
    layers: Sequence[Layer]
    store: StreamStore | None
    origins: Collection[str]
    _sockets_of_key: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._repeats = next((each for each in self.layers if each.once_header), Layer())

    async def run_pipeline(self, exchange: Exchange, found: Found) -> None:
        """Run a pipeline.

        Answers when the model has sent all of its responses. A request with a file may be a form, and a request of one
        file may be its bytes.
        """
        pipeline = self.inference.admit(exchange, found["name"], "unary")
        value = exchange.header(self._repeats.once_header)
        once = None if value is None else self._repeats.once_of(exchange, value)
        call = self.inference.begin(exchange, pipeline, pipeline.timeout_s)
        request = await read_inference(exchange, pipeline, self.limits, call.deadline)
        call.requests, call.answer = [request], answer_of(pipeline, request, is_whole=True)
        if once is None or not pipeline.spec.idempotent:
            with exchange.cancelled_on_disconnect():
                ending = await self.inference.answer(call)
            await exchange.send_json(values_of(pipeline, ending))
            return

        async def run() -> WholeAnswer:
            return await whole_answer_of(pipeline, await self.inference.answer(call))

        answer = await once.answer(pipeline.name, call.requests[0], call.deadline, run)
        exchange.record.exit_early(answer.early_exit)
        await exchange.answer(answer.body, JSON)

    async def stream_pipeline(self, exchange: Exchange, found: Found) -> Response:
        """Run a pipeline as a stream.

        Sends each response of the model as an event. The stream depends on this connection: a repeated request with
        `Last-Event-ID` gets 400. `POST /v1/streams` starts streams that can be resumed.
        """
        pipeline = self.inference.admit(exchange, found["name"], "stream")
        check_is_start(exchange)
        call = self.inference.begin(exchange, pipeline, pipeline.stream_spec().timeout_s)
        request = await read_inference(exchange, pipeline, self.limits, call.deadline)
        call.requests, call.answer = [request], answer_of(pipeline, request, is_whole=False)
        with exchange.cancelled_on_disconnect():
            opened = await self.inference.open_stream(call)
        return StreamResponse(Reply.of(*opened), self.limits)

    async def start_stream(self, exchange: Exchange, _found: Found) -> Response:
        """Start a stream that can be resumed.

        The stream runs without a connection. Read it at the address in `Location`, which needs no key.
        """
        record = exchange.record
        record.transport = "stream"
        store, inference, limits = self._store(), self.inference, self.limits
        inference.workload.begin(exchange)
        value, body, is_first = exchange.header(self._repeats.once_header), memoryview(b""), False
        once = None if value is None else self._repeats.once_of(exchange, value)

        async def read() -> memoryview:
            streamed = (each for each in inference.allowed(exchange) if each.spec.stream is not None)
            return await bodies.read_json_of_any(exchange, limits, streamed)

        async def run() -> StartedStream:
            nonlocal is_first
            is_first = True
            inference.check_load_of_any(
                exchange, lambda each: each.stream_terms.timeout_s if each.spec.stream else None
            )
            sent = body or await read()
            name, inputs = await bodies.off_loop(_members_of, sent, exchange)
            pipeline = inference.admit(exchange, name, "stream")
            bodies.check_size(len(sent), limits.of(pipeline))
            deadline = exchange.deadline(pipeline.stream_spec().timeout_s)
            request = await bodies.off_loop(pipeline.request_of_json, inputs, exchange, deadline)
            call = inference.call(exchange, pipeline, deadline)
            call.requests, call.answer = [request], answer_of(pipeline, request, is_whole=False)
            with exchange.cancelled_on_disconnect():
                await store.require_room(record.key)
                slot = await inference.take_slot(call)
            stream_id = await inference.start_resumable(call, slot, store)
            return StartedStream(stream_id, record.request_id, deadline.remaining_s() + pipeline.stream_terms.resume_s)

        if once is None:
            started = await run()
        else:  # the load is checked after the key: a repeated request needs no slot
            body = await read()
            started = await once.start(store, body, run)
        if not is_first:
            record.transport = None  # the stream counts once
        url = f"/v1/streams/{started.id}"
        answer = StreamStarted(id=started.id, url=url, request_id=started.request_id)
        return JsonResponse(answer, 201, {"Location": url})

    async def read_stream(self, exchange: Exchange, found: Found) -> Response:
        """Read or resume a stream.

        Sends the events after `Last-Event-ID`, those of the past at once. Several readers may read it.
        """
        last = exchange.header(b"last-event-id") or "0"
        if not _EVENT_ID.fullmatch(last):
            raise errors.InvalidRequest("Last-Event-ID is not an event id.")
        self.inference.workload.add(exchange)
        store, after = await self._store_for(exchange, found["id"]), int(last)
        reader = await store.reader(found["id"], after)
        if reader is None:
            return Response(status_code=204)
        response = ResumedResponse(Reply(reader, ended=reader.close), self.limits)
        response.after = after
        if exchange.scope["method"] == "HEAD":
            await reader.close()
            return Response(headers=response.headers)
        return response

    async def delete_stream(self, exchange: Exchange, found: Found) -> Response:
        """End and delete a stream.

        Cancels the work in Triton. The readers of the stream get its terminal event.
        """
        store = await self._store_for(exchange, found["id"])
        await store.delete(found["id"])
        return Response(status_code=204)

    async def _store_for(self, exchange: Exchange, stream_id: str) -> StreamStore:
        """Raises ResumableStreamsOff, or Forbidden if the request has a key, and another key started the stream."""
        store, key = self._store(), exchange.key
        if key is not ANYONE and await store.caller_of(stream_id) not in {"", key.id}:
            raise errors.Forbidden(
                "Another API key started this stream.", hint="Send the key that started it, or no key."
            )
        return store

    def _store(self) -> StreamStore:
        """Raises ResumableStreamsOff."""
        if self.store is None:
            raise errors.ResumableStreamsOff(
                "This gateway has several processes and no Redis to share streams between them.",
                hint="POST /v1/pipelines/{pipeline}/stream works. For resumable streams, set GATEWAY_REDIS_URL.",
            )
        return self.store

    async def open_socket(self, exchange: Exchange, found: Found) -> None:
        exchange.record.transport = TRANSPORT
        check_socket_origin(exchange, self.origins)
        pipeline = self.inference.admit(exchange, found["name"], TRANSPORT)
        limits = self.limits.of(pipeline)
        protocol, headers = handshake(exchange, limits.max_body_bytes)
        with self._counted(exchange.key):
            own = PipelineMessageHandler(self.inference, exchange, pipeline.name)
            handlers = (layer.handler_of(exchange, pipeline) for layer in self.layers)
            handler = next((each for each in handlers if each is not None), own)
            terms = SocketTerms(
                ping_s=limits.ping_s,
                send_s=limits.send_s,
                stall_s=STALL_S,
                message_s=limits.body_s,
                hold=exchange.hold,
                release=exchange.release,
            )
            try:
                websocket = exchange.upgrade(protocol, headers, terms)
            except errors.GatewayError:
                handler.closed()
                raise
            exchange.record.transport = None  # each message is a request of its own
            await Socket(exchange, websocket, handler, self.inference).run()

    @contextmanager
    def _counted(self, caller: Key) -> Iterator[None]:
        """Counts an open WebSocket of a key. Raises TooManyRequests. Without a key, only connections are limited."""
        own, key = self.inference.admission.share(caller.limits.websockets), caller.id
        most = max(self.limits.max_connections // 2, 1) if own is None else own
        if key and self._sockets_of_key[key] >= most:
            hint = "Close WebSockets that are not needed, or let an operator raise `limits.websockets` of the key."
            raise errors.TooManyRequests("As many WebSockets are open as this API key may have.", hint=hint)
        self._sockets_of_key[key] += 1
        try:
            yield
        finally:
            self._sockets_of_key -= Counter([key])


@dataclass(eq=False)
class PipelineMessageHandler(MessageHandler):
    """Each message is a request of its own. Only messages end requests, which keep nothing between them."""

    at_once = 8
    inference: Inference
    exchange: Exchange
    name: str

    async def start(self, message: Message, record: RequestRecord) -> Reply:
        exchange, inference = self.exchange, self.inference
        check_pipeline(exchange, inference.catalog, self.name)
        pipeline = inference.catalog.pipeline(self.name)
        streams = pipeline.spec.stream
        call = inference.begin(exchange, pipeline, pipeline.timeout_s if streams is None else streams.timeout_s)
        call.record = record
        request = await read_message(exchange, pipeline, message, call.deadline)
        is_whole = streams is None and pipeline.batch is None
        call.requests, call.answer = [request], answer_of(pipeline, request, is_whole=is_whole)
        return Reply.of(*await inference.open_stream(call))


def _members_of(body: memoryview) -> tuple[str, memoryview]:
    """The pipeline's name, and its inputs as JSON. Raises InvalidJson or InvalidInput."""
    try:
        given = list(islice(members_of(body), 3))
        members = dict(given)
        if len(given) != 2 or len(members) != 2:
            raise KeyError
        return msgspec.json.decode(members["pipeline"], type=str), members["inputs"]
    except (msgspec.ValidationError, KeyError, errors.InvalidRequest) as exc:
        needed = errors.FieldProblem("body", 'must be {"pipeline": "<name>", "inputs": {...}}')
        raise errors.InvalidInput("The body must name a pipeline and hold its inputs.", errors=[needed]) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise malformed() from exc


def check_is_start(exchange: Exchange) -> None:
    """Raises InvalidRequest for a client that wants to resume: its stream would begin again, with the first event."""
    if exchange.header(b"last-event-id"):
        raise errors.InvalidRequest(
            "This stream cannot be resumed.",
            hint="Start it with POST /v1/streams and read it with GET: that stream resumes after Last-Event-ID.",
        )


async def read_inference(
    exchange: Exchange, pipeline: Pipeline, limits: bodies.Limits, deadline: Deadline
) -> InferenceRequest:
    """Raises the client errors of ``app.core.errors``."""
    limits = limits.of(pipeline)
    content_type = exchange.header(b"content-type") or ""
    media_type = bodies.media_type_of(content_type)
    is_form = media_type == "multipart/form-data"
    if is_form or bodies.is_json(media_type):
        bodies.check_no_query(exchange)
        read = partial(_request_of_form, pipeline, content_type) if is_form else pipeline.request_of_json
        request = await bodies.off_loop(read, await bodies.read_body(exchange, limits), exchange, deadline)
        exchange.body_memory = None  # the tensors were copied, and the answer needs memory too
        return request
    if is_file_type(media_type):
        file = file_field_of(pipeline)
        try:
            check_media_type(media_type, file.spec.kind)
        except ValueError as exc:
            raise errors.UnsupportedMediaType(f"'{file.name}' {exc}.") from exc
        parameters = query_of(exchange, file.name)
        # A stream would keep the tensor's memory until its end.
        is_unary, start = exchange.record.transport == "unary", ELEMENT if file.tensor.datatype == BYTES else 0
        body = await bodies.read_body(exchange, limits, tensor_at=start if is_unary else None)
        return pipeline.request_of_form({**parameters, file.name: body})
    if not any(field.takes_file for field in pipeline.inputs):
        raise errors.UnsupportedMediaType(NO_FILE, hint=bodies.JSON_HINT)
    raise errors.UnsupportedMediaType(
        f"The content type must be application/json, multipart/form-data, {', '.join(FILE_TYPES)}.",
        hint=bodies.JSON_HINT if pipeline.raw_field is None else FILE_TYPE_HINT,
    )


def _request_of_form(pipeline: Pipeline, content_type: str, body: memoryview) -> InferenceRequest:
    lists = [field.name for field in pipeline.inputs if field.is_list_of_files]
    max_parts = bodies.MAX_PARTS + len(lists) * pipeline.max_items
    return pipeline.request_of_form(bodies.parts_of(content_type, body, lists, max_parts))


async def read_message(
    exchange: Exchange, pipeline: Pipeline, message: Message, deadline: Deadline
) -> InferenceRequest:
    """The request of a message: a JSON body, or as binary data a raw body. Raises the errors of ``read_inference``."""
    body = memoryview(message.data)
    if message.is_text:
        bodies.check_no_query(exchange)
        return await bodies.off_loop(pipeline.request_of_json, body, exchange, deadline)
    if (file := pipeline.raw_field) is None:
        text = "A binary message is accepted only by a pipeline whose one required input is a file."
        raise errors.UnsupportedMediaType(text, hint=f"Send JSON as a text message. {FILE_HINT}")
    return pipeline.request_of_form({**query_of(exchange, file.name), file.name: body})


def query_of(exchange: Exchange, file: str) -> dict[str, str]:
    """The parameters of a raw body, whose field is ``file``. Raises InvalidRequest or InvalidInput."""
    bodies.check_query(exchange)
    query = QueryParams(exchange.scope["query_string"])
    bodies.check_given_once([file, *(name for name, _ in query.multi_items())])
    return dict(query)


def file_field_of(pipeline: Pipeline) -> InputField:
    """The field of a raw body. Raises UnsupportedMediaType."""
    if (field := pipeline.raw_field) is not None:
        return field
    if not any(field.takes_file for field in pipeline.inputs):
        has_bytes = any(field.tensor.datatype == BYTES for field in pipeline.inputs)
        raise errors.UnsupportedMediaType(NO_FILE, hint=FILE_HINT if has_bytes else bodies.JSON_HINT)
    raise errors.UnsupportedMediaType(
        "Raw bytes are accepted only by a pipeline whose one required input is a file.",
        hint="Send application/json or multipart/form-data instead.",
    )


def values_of(pipeline: Pipeline, ending: Ending) -> Mapping[str, Any]:
    """The values of a whole answer."""
    values = ending.outputs[0]
    return {**values, "early_exit": ending.shown_exit} if pipeline.may_exit else values


async def whole_answer_of(pipeline: Pipeline, ending: Ending) -> WholeAnswer:
    """The event loop runs in between if the values are large."""
    values = values_of(pipeline, ending)
    body = b"".join(await json_in_turns(values)) if is_large(values) else json_of(values)
    return WholeAnswer(body, ending.early_exit)
