"""Runs one WebSocket: each message is a request, whose events are sent as text messages with its number.

``{"event":"output","request":1,"data":{...}}``: the events and their data are those of Server-Sent Events. A
``MessageHandler`` knows what a message runs; ``app.http1.websocket`` has the connection.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import ClassVar

from msgspec import Struct
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHeader, InvalidUpgrade, NegotiationError
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from app.api.call import Inference
from app.api.endpoint import delay_refusal
from app.api.error_table import problem_of, status_of
from app.api.exchange import Exchange, Header
from app.api.streaming import Events
from app.core.errors import (
    ClientClosedRequest,
    Forbidden,
    GatewayError,
    Internal,
    InvalidRequest,
    TooManyRequests,
    Unauthenticated,
    UpgradeRequired,
)
from app.core.json import json_of
from app.http1.websocket import CloseReason, Message, Reason, WebSocket, cause_of
from app.observability.log import StructuredLogger
from app.observability.record import RequestRecord
from app.streams.stream import Event

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
        raise UpgradeRequired("This address is a WebSocket.", hint=hint)
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
        raise UpgradeRequired("This address is a WebSocket.", hint=hint) from error
    hint = f"Check the header {name}." if name else f"Offer the subprotocol '{SUBPROTOCOL}', or none."
    raise InvalidRequest("The WebSocket handshake is not valid.", hint=hint) from error


class RequestReason(Reason):
    UNAUTHENTICATED = "unauthenticated", 1008
    FORBIDDEN = "forbidden", 1008


async def _nothing() -> None: ...


class Reply(Struct, frozen=True, eq=False):
    """The answer to one message. ``opening``: its first events; ``end``: stops it; ``ended``: waits for its end.

    ``end`` and ``ended`` have defaults for a reply whose ``opening`` has all events.
    """

    events: Events
    opening: Sequence[Event]
    end: Callable[[GatewayError], None] = lambda _cause: None
    ended: Callable[[], Awaitable[None]] = _nothing


class MessageHandler:
    """What the messages of one WebSocket run.

    ``at_once``: limit of the messages that run at the same time. ``runs_in_drain``: whether the drain lets the client
    send further messages. ``reasons``: the errors of a message that also end its WebSocket.
    """

    at_once = 1
    runs_in_drain = False
    reasons: ClassVar[Mapping[type[GatewayError], Reason]] = {
        Unauthenticated: RequestReason.UNAUTHENTICATED,
        Forbidden: RequestReason.FORBIDDEN,
    }

    def opened(self, websocket: WebSocket) -> None:
        """Called once, before the first message."""

    async def start(self, message: Message, record: RequestRecord) -> Reply:
        """Raises GatewayError if the message fails before its first event."""
        raise NotImplementedError

    def closed(self) -> None:
        """Called once, when no message runs any more."""


class Socket:
    """Implements :class:`app.api.exchange.Work`."""

    def __init__(self, exchange: Exchange, websocket: WebSocket, handler: MessageHandler, inference: Inference) -> None:
        self._record = exchange.record
        self._websocket = websocket
        self._handler = handler
        self._metrics = inference.metrics
        self._workload = inference.workload
        self._requests = 0
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(handler.at_once)
        self._starting: set[asyncio.Task[None]] = set()
        """The running tasks whose message has no reply yet."""
        self._replies: set[Reply] = set()
        self._cause: GatewayError | None = None
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

    def end(self, cause: GatewayError) -> None:
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
                reply = await self._handler.start(message, record)
            finally:
                self._starting.discard(task)
            await self._relay(number, reply, record)
        except GatewayError as error:
            await self._refuse(number, record, error)
        except asyncio.CancelledError:
            await self._refuse(number, record, self._cause or Internal("The gateway cancelled the request."))
        except Exception:
            _failures.exception("unexpected error", extra={"request_id": record.request_id})
            await self._refuse(number, record, Internal("The gateway failed. Its log shows the cause."))
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
            reply.end(self._cause or ClientClosedRequest("The WebSocket ended."))
            await reply.ended()
            raise
        finally:
            self._replies.discard(reply)

    async def _refuse(self, number: int, record: RequestRecord, error: GatewayError) -> None:
        """Sends the error, unless the WebSocket has ended. The record may have the error of the stream already."""
        if record.error is None:
            record.fail(error)
        if self._websocket.reason is not None:
            return
        record.status = status_of(error)
        if isinstance(error, TooManyRequests):
            await delay_refusal()
        try:
            await self._websocket.send([_text_of(number, "error", json_of(problem_of(error, record.request_id)))])
        except GatewayError:
            return
        self._close_after(error)

    def _close_after(self, error: GatewayError | None) -> None:
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
