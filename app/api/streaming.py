"""Sends the events of streams to clients: as Server-Sent Events, and as text messages of a WebSocket.

A stream has one client, and is sent as fast as that client reads. Source: WHATWG HTML, "Server-sent events".
sse-starlette formats the events; docs/decisions/0006-event-streams.md has the reasons for a response of its own.

On a WebSocket each message is a request, whose events have its number: ``{"event":"output","request":1,"data":{...}}``.
A ``MessageHandler`` knows what a message runs; ``app.http1.websocket`` has the connection.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import ClassVar, Self, get_args

import msgspec
from msgspec import Struct
from sse_starlette import ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader, InvalidUpgrade, NegotiationError
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from app.api.bodies import Limits
from app.api.call import Inference
from app.api.endpoint import Endpoint, delay_refusal
from app.api.error_table import ERROR_BY_CODE, ROW_BY_ERROR, problem_of, status_of
from app.api.exchange import Exchange, Header
from app.core import errors
from app.core.inference import IdleTimeout
from app.core.json import json_of
from app.http1.websocket import CloseReason, Message, Reason, WebSocket, cause_of
from app.observability.log import StructuredLogger
from app.observability.record import RequestRecord
from app.streams.store import Reader
from app.streams.stream import STALL_S, TERMINAL, Event, EventLog, EventName, Stream

PING = ServerSentEvent(comment="", sep="\n").encode()
"""A heartbeat comment, which readers ignore."""
RETRY = ServerSentEvent(retry=1000, sep="\n").encode()
"""The delay in milliseconds before a browser's EventSource reconnects."""

MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"}
"""Keep proxies from storing, compressing and buffering the stream."""
_FRAMES = {name: ServerSentEvent("%b", event=name, id="%d", sep="\n").encode() for name in get_args(EventName)}
"""A frame for each event name, with placeholders for the id and the data."""


AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
"""sse-starlette patches uvicorn to end streams on a signal, but the gateway's drain lets running streams continue."""


Events = EventLog | Reader
"""What is sent: ``is_full`` means that the stream waits for this client.

StreamEvicted or UpstreamUnavailable ends the answer without a terminal event: the client may retry.
"""


async def _nothing() -> None: ...


class Reply(Struct, eq=False):
    """The events for one client. ``opening``: the first ones, if they are there already.

    ``end``: is called if the client disconnects or does not read. ``ended``: waits for the end of what writes them.
    Both have defaults for events that nothing writes any more.
    """

    events: Events
    opening: Sequence[Event] = ()
    end: Callable[[errors.GatewayError], None] = lambda _cause: None
    ended: Callable[[], Awaitable[None]] = _nothing

    @classmethod
    def of(cls, stream: Stream, opening: Sequence[Event]) -> Self:
        """Of a stream that ends with its request."""
        return cls(stream.log, opening, stream.end, stream.ended)


class StreamResponse(Response):
    """A dialect with a different event format has its own subclass.

    Differs from sse-starlette's response (decision 6): one task per stream, all available events in one send, and a
    limit for clients that do not read. The drain ends streams with their terminal event, not with a signal.
    """

    ping = PING
    """The heartbeat, sent on an idle stream."""
    preamble = b""
    """Sent before the first event."""

    def __init__(self, reply: Reply, limits: Limits) -> None:
        super().__init__(headers=HEADERS, media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self.after = 0
        """The id of the last event that the client has received."""
        self._reply, self._limits, self._has_ended = reply, limits, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        self._connection, self._send = exchange.connection, exchange.send_body
        try:
            with exchange.cancelled_on_disconnect():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                exchange.forget_request()
                opening, self._reply.opening = self._reply.opening, ()
                await self._deliver(self.preamble + self._frames_of(opening) or self.ping)
                del opening  # is not kept
                try:
                    await self._relay()
                    error = self.error_of(exchange)
                # The events end without a terminal event.
                except (errors.StreamEvicted, errors.UpstreamUnavailable) as exc:
                    error = type(exc)
                if error is not None and ROW_BY_ERROR[error].is_of_replica:
                    exchange.connection.end_after_answer()
                await self._deliver(b"", more_body=False)
        except errors.ClientClosedRequest as exc:
            self._reply.end(exc)
        finally:
            await self._reply.ended()

    @staticmethod
    def frame_of(event: Event) -> bytes:
        """Renders an event, whose data is JSON text on one line."""
        return _FRAMES[event.name] % (event.id, event.data)

    def error_of(self, exchange: Exchange) -> type[errors.GatewayError] | None:
        """The error of the terminal event, if the event is an error."""
        error = exchange.record.error
        return None if error is None else type(error)

    async def _relay(self) -> None:
        """Sends the events up to the terminal event, and heartbeats while the stream is idle."""
        while not self._has_ended:
            try:
                async with IdleTimeout(self._limits.ping_s) as silence:
                    while not self._has_ended:
                        body = self._frames_of(await self._reply.events.read(self.after))
                        silence.pause()
                        await self._deliver(body)
                        del body  # otherwise it stays in memory until the next event
                        silence.renew()
            except TimeoutError:
                await self._deliver(self.ping)

    def _frames_of(self, events: Sequence[Event]) -> bytes:
        """The next frames to send."""
        if events:
            self.after, self._has_ended = events[-1].id, events[-1].name in TERMINAL
        return b"".join(map(self.frame_of, events))

    async def _deliver(self, body: bytes, *, more_body: bool = True) -> None:
        """Ends the stream with `slow_consumer` if the client makes no progress, and later aborts the connection.

        No progress: no byte was sent for `send_s`, or for STALL_S while the stream waits for this client.
        """
        message = {"type": "http.response.body", "body": body, "more_body": more_body}
        connection, send_s, still_s = self._connection, self._limits.send_s, 0.0
        if not connection.unsent_bytes:  # then the connection accepts the message at once
            await self._send(message)
            return
        step_s = min(STALL_S, send_s)
        while still_s < (step_s if self._reply.events.is_full else send_s):
            before = connection.unsent_bytes
            try:
                async with asyncio.timeout(step_s):
                    await self._send(message)
                    return
            except TimeoutError:
                still_s = 0.0 if connection.unsent_bytes < before else still_s + step_s
        self._reply.end(errors.SlowConsumer("The client did not read the stream."))
        try:
            async with asyncio.timeout(send_s):
                await self._send(message)
        except TimeoutError:
            connection.abort()
            raise errors.ClientClosedRequest("The client stopped reading and was disconnected.") from None


class ResumedResponse(StreamResponse):
    """The events of a stream that another request has started, whose record has the error."""

    preamble = RETRY
    _error: type[errors.GatewayError] | None = None

    def error_of(self, _exchange: Exchange) -> type[errors.GatewayError] | None:
        return self._error

    def _frames_of(self, events: Sequence[Event]) -> bytes:
        if events and events[-1].name == "error":
            self._error = ERROR_BY_CODE.get(msgspec.json.decode(events[-1].data)["code"])
        return super()._frames_of(events)


TRANSPORT = "websocket"
SUBPROTOCOL = Subprotocol("triton-gateway")
_HANDSHAKE = (b"upgrade", b"connection", b"origin")
_HANDSHAKE_FAMILY = b"sec-websocket-"

_log = StructuredLogger("triton_gateway.websocket")
_failures = logging.getLogger(__name__)


class _Protocol(ServerProtocol):
    def select_subprotocol(self, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
        """Raises NegotiationError: a browser fails if none of the protocols that it offers is selected."""
        if subprotocols and SUBPROTOCOL not in subprotocols:
            raise NegotiationError
        return SUBPROTOCOL if subprotocols else None

    def recv_frame(self, frame: Frame) -> None:
        """Accepts a close frame between the fragments of a message, too (RFC 6455, 5.4)."""
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


def handshake(exchange: Exchange, max_bytes: int) -> tuple[ServerProtocol, list[Header]]:
    """Accepts a request. Returns the state of the new WebSocket, and the headers of the answer.

    ``max_bytes``: limit of a message. Raises UpgradeRequired or InvalidRequest.
    """
    scope, received = exchange.scope, Headers()
    hint = "Open it with a client of WebSocket version 13, over HTTP/1.1."
    if scope["method"] != "GET" or scope["http_version"] != "1.1":
        raise errors.UpgradeRequired("This address is a WebSocket.", hint=hint)
    for name, value in scope["headers"]:
        if name in _HANDSHAKE or name.startswith(_HANDSHAKE_FAMILY):
            received[name.decode("latin-1")] = value.decode("latin-1")
    # Without extensions: a compressed message could be 1,000 times larger than the limit of its frames.
    protocol = _Protocol(state=OPEN, max_size=max_bytes)
    response = protocol.accept(Request(scope["path"], received))
    error = protocol.handshake_exc
    if error is None:
        return protocol, [(name.lower().encode(), value.encode()) for name, value in response.headers.raw_items()]
    protocol.parser.close()  # its frame refers to the protocol
    name = error.name if isinstance(error, InvalidHeader) else None
    if isinstance(error, InvalidUpgrade) or name == "Sec-WebSocket-Version":
        raise errors.UpgradeRequired("This address is a WebSocket.", hint=hint) from error
    hint = f"Check the header {name}." if name else f"Offer the subprotocol '{SUBPROTOCOL}', or none."
    raise errors.InvalidRequest("The WebSocket handshake is not valid.", hint=hint) from error


class RequestReason(Reason):
    UNAUTHENTICATED = "unauthenticated", 1008
    FORBIDDEN = "forbidden", 1008


class MessageHandler:
    """What the messages of one WebSocket run.

    ``at_once``: limit of the messages that run at the same time. ``runs_in_drain``: whether the drain lets the client
    send further messages. ``reasons``: the errors of a message that also end its WebSocket.
    """

    at_once = 1
    runs_in_drain = False
    reasons: ClassVar[Mapping[type[errors.GatewayError], Reason]] = {
        errors.Unauthenticated: RequestReason.UNAUTHENTICATED,
        errors.Forbidden: RequestReason.FORBIDDEN,
    }

    def opened(self, websocket: WebSocket) -> None:
        """Called once, before the first message."""

    async def start(self, message: Message, record: RequestRecord) -> Reply:
        """Raises GatewayError if the message fails before its first event."""
        raise NotImplementedError

    def closed(self) -> None:
        """Called once, when the last message has ended."""


class Socket:
    """Implements :class:`app.api.exchange.Work`."""

    def __init__(self, exchange: Exchange, websocket: WebSocket, handler: MessageHandler, inference: Inference) -> None:
        self._exchange, self._record = exchange, exchange.record
        self._endpoint: Endpoint = exchange.scope["endpoint"]
        self._websocket, self._handler = websocket, handler
        self._metrics = inference.metrics
        self._workload = inference.workload
        self._requests = 0
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(handler.at_once)
        self._starting: set[asyncio.Task[None]] = set()
        """The running tasks whose message has no reply yet."""
        self._replies: set[Reply] = set()
        self._cause: errors.GatewayError | None = None
        websocket.on_closed = self._cancel
        websocket.is_behind = lambda: any(reply.events.is_full for reply in self._replies)

    async def run(self) -> None:
        """Returns when the connection has ended."""
        pipeline = self._record.pipeline
        self._metrics.open_websockets.labels(pipeline).inc()
        self._workload.add(self, None if self._handler.runs_in_drain else self._websocket.stop_receiving)
        self._handler.opened(self._websocket)
        try:
            for number in count(1):
                await self._room.acquire()
                message = await self._websocket.receive()
                if message is None:
                    break
                self._requests = number
                task = asyncio.create_task(self._answer(number, message))
                self._running.add(task)
                self._starting.add(task)
                task.add_done_callback(self._running.discard)
                task.add_done_callback(lambda _task: self._room.release())
            if self._running:
                await asyncio.wait(self._running)
        finally:
            self._handler.closed()
            self._websocket.close(CloseReason.DRAINING)
            await self._websocket.ended()
            self._workload.remove(self)
            self._metrics.open_websockets.labels(pipeline).dec()
            self._metrics.ended_websockets.labels(pipeline, self._websocket.reason or CloseReason.LOST).inc()
            if _log.is_enabled_for(logging.INFO):
                fields: dict[str, object] = {
                    "request_id": self._record.request_id,
                    "pipeline": pipeline,
                    "reason": str(self._websocket.reason),
                    "requests": self._requests,
                    "duration_s": round(self._record.duration_s, 3),
                }
                _log.log(logging.INFO, "websocket ended", fields | ({"key": key} if (key := self._record.key) else {}))

    def end(self, cause: errors.GatewayError) -> None:
        """Streams are work of their own, so only messages without a reply are ended here."""
        self._cause = self._cause or cause
        self._websocket.stop_receiving()
        for task in self._starting:
            task.cancel()

    async def _answer(self, number: int, message: Message) -> None:
        own, task = self._record, asyncio.current_task()
        assert task is not None
        record = RequestRecord(
            f"{own.request_id}.{number}",
            own.method,
            own.path,
            pipeline=own.pipeline,
            transport=TRANSPORT,
            key=own.key,
            status=200,
            trace=own.trace,
        )
        try:
            try:
                self._endpoint.check_key(self._exchange)  # a WebSocket may be open longer than the key is valid
                reply = await self._handler.start(message, record)
            finally:
                self._starting.discard(task)
            await self._relay(number, reply, record)
        except errors.GatewayError as error:
            await self._refuse(number, record, error)
        except asyncio.CancelledError:
            await self._refuse(number, record, self._cause or errors.Internal("The gateway cancelled the request."))
        except Exception:
            _failures.exception("unexpected error", extra={"request_id": record.request_id})
            await self._refuse(number, record, errors.Internal("The gateway failed. Its log shows the cause."))
        finally:
            message.release()
            record.close(self._metrics)
            if record.error is not None:
                record.error.forget_frames()  # they hold the message

    async def _relay(self, number: int, reply: Reply, record: RequestRecord) -> None:
        """Does not wait after the terminal event: a client that leaves then must not cancel an answered request."""
        events = reply.opening
        self._replies.add(reply)
        try:
            while True:
                if events:
                    await self._websocket.send([_text_of(number, each.name, each.data) for each in events])
                    if events[-1].is_terminal:
                        self._close_after(record.error)
                        return
                events = await reply.events.read(events[-1].id if events else 0)
        except BaseException:
            reply.end(self._cause or errors.ClientClosedRequest("The WebSocket ended."))
            await reply.ended()
            raise
        finally:
            self._replies.discard(reply)

    async def _refuse(self, number: int, record: RequestRecord, error: errors.GatewayError) -> None:
        """Sends the error, unless the WebSocket has ended. The record may have the error of the stream already."""
        if record.error is None:
            record.fail(error)
        if self._websocket.reason is not None:
            return
        record.status = status_of(error)
        if isinstance(error, errors.TooManyRequests):
            await delay_refusal()
        try:
            await self._websocket.send([_text_of(number, "error", json_of(problem_of(error, record.request_id)))])
        except errors.GatewayError:
            return
        self._close_after(error)

    def _close_after(self, error: errors.GatewayError | None) -> None:
        """Ends the WebSocket if no further message can be answered after this error of one."""
        if error is not None and (reason := self._handler.reasons.get(type(error))) is not None:
            self._websocket.close(reason)

    def _cancel(self) -> None:
        """The WebSocket has ended."""
        reason = self._websocket.reason
        if self._cause is None and reason is not None:
            self._cause = cause_of(reason)
        for task in self._running:
            task.cancel()


def _text_of(number: int, event: str, data: bytes) -> bytes:
    """The data of an event is JSON already."""
    return b'{"event":"%b","request":%d,"data":%b}' % (event.encode(), number, data)
