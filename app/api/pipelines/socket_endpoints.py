"""``GET /v1/pipelines/{pipeline}/session``: a WebSocket whose messages are requests to the pipeline.

A text message is a JSON body, a binary message the raw body of the pipeline's only file. The parameters of binary
messages are in the query of the address.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from app.admission.keys import Caller
from app.api.access import check_pipeline
from app.api.bodies import check_no_query, off_loop
from app.api.call import Inference
from app.api.endpoint import Found
from app.api.exchange import Exchange
from app.api.limits import Limits
from app.api.pipelines.reading import file_field_of, query_of
from app.api.request_layer import Layer
from app.api.sockets.handshake import check_origin, handshake
from app.api.sockets.socket import TRANSPORT, MessageHandler, Reply, Socket
from app.core.errors import GatewayError, TooManyRequests
from app.core.inference import Deadline, InferenceRequest
from app.http1.websocket import Message, SocketTerms
from app.observability.record import RequestRecord
from app.pipelines.pipeline import Pipeline
from app.pipelines.run import answer_of, streamed_answer_of
from app.streams.events import STALL_S

PATH = "/v1/pipelines/{name}/session"
MAX_AT_ONCE = 8
"""Limit of the requests of one WebSocket that run at the same time."""


class SocketEndpoints:
    """``origins``: of the pages of other sites that may open a WebSocket."""

    def __init__(self, inference: Inference, limits: Limits, origins: Collection[str], layers: Sequence[Layer]) -> None:
        self._inference = inference
        self._limits = limits
        self._origins = origins
        self._layers = layers
        self._open_of_key = Counter[str]()

    async def open_socket(self, exchange: Exchange, found: Found) -> None:
        exchange.record.transport = TRANSPORT
        check_origin(exchange, self._origins)
        pipeline = self._inference.admit(exchange, found["name"], TRANSPORT)
        limits = self._limits.of(pipeline)
        protocol, headers = handshake(exchange, limits.max_body_bytes)
        with self._counted(exchange.caller):
            own = PipelineMessageHandler(self._inference, exchange, pipeline.name, exchange.scope["endpoint"].check_key)
            handlers = (layer.handler_of(exchange, pipeline) for layer in self._layers)
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
            except GatewayError:
                handler.closed()
                raise
            exchange.record.transport = exchange.record.on_end = None  # each message is a request of its own
            await Socket(exchange, websocket, handler, self._inference.metrics, self._inference.workload).run()

    @contextmanager
    def _counted(self, caller: Caller) -> Iterator[None]:
        """Counts an open WebSocket of a key. Raises TooManyRequests. Without a key, only connections are limited."""
        own, key = self._inference.admission.share(caller.limits.websockets), caller.id
        most = max(self._limits.max_connections // 2, 1) if own is None else own
        if key and self._open_of_key[key] >= most:
            hint = "Close WebSockets that are not needed, or let an operator raise `limits.websockets` of the key."
            raise TooManyRequests("As many WebSockets are open as this API key may have.", hint=hint)
        self._open_of_key[key] += 1
        try:
            yield
        finally:
            self._open_of_key[key] -= 1
            if not self._open_of_key[key]:
                del self._open_of_key[key]


class PipelineMessageHandler(MessageHandler):
    """Each message is a request of its own. Only messages end requests, which keep nothing between them."""

    at_once = MAX_AT_ONCE

    def __init__(
        self, inference: Inference, exchange: Exchange, name: str, check_key: Callable[[Exchange], None]
    ) -> None:
        self._inference = inference
        self._exchange = exchange
        self._name = name
        self._check_key = check_key

    async def start(self, message: Message, record: RequestRecord) -> Reply:
        """Checks the key again, because a WebSocket may be open longer than the key is valid."""
        exchange, inference = self._exchange, self._inference
        self._check_key(exchange)
        check_pipeline(exchange, inference.catalog, self._name)
        pipeline = inference.catalog.pipeline(self._name)
        streams = pipeline.spec.stream
        call = inference.begin(exchange, pipeline, pipeline.timeout_s if streams is None else streams.timeout_s)
        call.record = record
        request = await read_message(exchange, pipeline, message, call.deadline)
        is_whole = streams is None and pipeline.batch is None
        call.requests, call.answer = [request], (answer_of if is_whole else streamed_answer_of)(pipeline, request)
        stream, opening = await inference.open_stream(call)
        return Reply(stream.log, opening, stream.end, stream.ended)


async def read_message(
    exchange: Exchange, pipeline: Pipeline, message: Message, deadline: Deadline
) -> InferenceRequest:
    """Raises the client errors of ``app.core.errors``."""
    body = memoryview(message.data)
    if message.is_text:
        check_no_query(exchange)
        return await off_loop(pipeline.request_of_json, body, exchange, deadline)
    file = file_field_of(pipeline)
    return pipeline.request_of_form({**query_of(exchange, file.name), file.name: body})
