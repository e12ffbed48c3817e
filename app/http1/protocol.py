"""uvicorn's HTTP protocol with further limits: decision 3.

The parser reads only heads, one request at a time. A middleware cannot do this, because the application sees neither an
incomplete head nor the bytes after a body.
"""

import asyncio
import re
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from websockets.server import ServerProtocol

from app.core.aio import DrainRate
from app.core.errors import (
    ClientClosedRequest,
    GatewayError,
    HeadersTooLarge,
    InvalidRequest,
    SlowRequest,
    TooManyRequests,
)
from app.core.inference import new_request_id
from app.http1.closing import INTERIM_ANSWER, ClosingProtocol, LazyEvent, has_event
from app.http1.framing import BodySink, ChunkedBody
from app.http1.websocket import SocketTerms, WebSocket

T = TypeVar("T")
Header = tuple[bytes, bytes]
MAX_HEAD_BYTES = 16 * 1024
END_OF_HEAD = b"\r\n\r\n"
VERSIONS = {"1.0", "1.1"}
HEAD_TIMEOUT_S = 5.0
_TLS_HANDSHAKE = b"\x16\x03"
HEAD_BYTES = 16 * 1024
"""The most bytes that are received with a head. The application must see the head before it has memory for the body."""
PART_BYTES = 256 * 1024
"""The most bytes of a body that are received at once and copied."""
LARGE_BYTES = 64 * 1024
"""The smallest number of missing bytes that are received directly into the memory of their body."""
MOST_AT_ONCE = 1024 * 1024
"""Limit of the bytes received in one step of the event loop, a fraction of a millisecond."""
MAX_AHEAD_BYTES = 64 * 1024
"""Limit of the buffered bytes of pipelined requests. Above it, reading pauses."""
LINGERING_REFUSALS = 256
"""Limit of rejected connections that linger. Further ones are closed as soon as their answer is sent."""
SHORTEST_IDLE_S = 0.1
"""A connection that is idle for less is not closed for a new one: its next request may be on its way."""
SHORTEST_IDLE_WEBSOCKET_S = 1.0
"""The same for a WebSocket."""
_HOST = re.compile(rb"[0-9A-Za-z._~!$&'()*+,;=:%\[\]-]*")


@dataclass(slots=True, eq=False)
class ConnectionLimit:
    """Limits the connections of one port, and has what they share.

    ``on_refused`` is called for each connection above the limit. ``answer_of`` returns the answer to a request that
    the application does not get, for an error and a request id.
    """

    max_connections: int
    on_refused: Callable[[], None]
    answer_of: Callable[[GatewayError, str], Response]
    outflow: DrainRate = field(default_factory=DrainRate)
    """The connections that were accepted and not refused."""
    refused: set[asyncio.Protocol] = field(default_factory=set)
    """The rejected connections that are still open. They do not count towards the limit."""
    idle: dict["HttpConnection", float] = field(default_factory=dict)
    """The connections that wait for a further request, the longest idle one first, and since when."""
    idle_websockets: dict[WebSocket, float] = field(default_factory=dict)
    """The WebSockets without a message that runs, in the same order."""
    is_closing: bool = False
    """Whether every answer on a new connection closes it, because the gateway shuts down."""
    room: memoryview = field(default_factory=lambda: memoryview(bytearray(PART_BYTES)))
    """The memory into which the connections receive, one after the other."""
    default_headers: Sequence[Header] = ()
    """uvicorn's headers of every answer. uvicorn creates a new list once a second."""
    default_lines: bytes = b""
    """The lines of these headers."""

    def close_longest_idle(self, now: float) -> bool:
        """Makes room for a new connection, of a WebSocket only if no other connection is idle.

        Returns False if all have been idle for a shorter time than SHORTEST_IDLE_S and SHORTEST_IDLE_WEBSOCKET_S.
        """
        for _ in range(len(self.idle)):
            connection, since = next(iter(self.idle.items()))
            if now - since < SHORTEST_IDLE_S:
                break
            del self.idle[connection]
            if connection.close_if_idle():
                return True
            self.idle[connection] = now
        longest = next(iter(self.idle_websockets.items()), None)
        return longest is not None and now - longest[1] >= SHORTEST_IDLE_WEBSOCKET_S and longest[0].close_if_idle()


class Receiver(asyncio.BufferedProtocol):
    """The protocol of a connection's transport, because uvicorn's protocol cannot choose the memory."""

    __slots__ = ("buffer_updated", "connection_lost", "eof_received", "get_buffer", "pause_writing", "resume_writing")

    def __init__(self, owner: "HttpConnection | WebSocket") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(owner, name))


class HttpConnection(ClosingProtocol):
    """The client's connection. Adds itself to each request's state, as ``connection``.

    ``on_lost`` is called once when the connection is lost. Work that an application gives to ``loop.call_soon`` after
    its answer follows the write of the answer, so that the client does not wait for it.
    """

    __slots__ = (
        "_ahead",
        "_chunks",
        "_closes_after_answer",
        "_direct",
        "_has_begun_answer",
        "_head",
        "_held",
        "_is_in_head",
        "_keeps_alive",
        "_limit",
        "_missing",
        "_sink",
        "_sink_error",
        "is_lost",
        "on_lost",
    )

    on_body = on_message_complete = None  # type: ignore[assignment]
    """The parser calls neither, because it reads heads only."""

    def __init__(self, limit: ConnectionLimit, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        self._limit = limit
        self._closes_after_answer = limit.is_closing
        self._is_in_head = False
        self._head = b""
        """The received part of an incomplete head."""
        self._missing = 0
        """The bytes of a body with a length that have not been received yet."""
        self._chunks: ChunkedBody | None = None
        """A chunked body that is being received."""
        self._sink: BodySink | None = None
        """Takes the parts of the body as they arrive."""
        self._sink_error: GatewayError | None = None
        self._keeps_alive = False
        """Whether the connection stays open after an answer to the whole request."""
        self._held: list[bytes] = []
        """The beginning of an answer, which is written at the end of the event loop's turn or of the connection."""
        self._has_begun_answer = False
        self._ahead = bytearray()
        """Received bytes that are not parsed yet, because an answer is in progress."""
        self._direct: BodySink | None = None
        """The sink into whose memory the body is received directly."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_protocol(Receiver(self))
        limit, now = self._limit, self.loop.time()
        if len(self.connections) <= limit.max_connections or limit.close_longest_idle(now):
            self.state_timer.start(HEAD_TIMEOUT_S, self._end_silently)
            return
        self.connections.discard(self)
        limit.refused.add(self)
        limit.on_refused()
        retry_after_s = limit.outflow.retry_after_s(1, now)
        error = TooManyRequests("The gateway has reached its limit for connections.", retry_after_s=retry_after_s)
        self._refuse(error, lingers=len(limit.refused) <= LINGERING_REFUSALS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self not in self._limit.refused:
            self._limit.outflow.left(1, self.loop.time())
        self._limit.refused.discard(self)
        self._limit.idle.pop(self, None)
        super().connection_lost(exc)
        self.is_lost = True
        if self.cycle is not None:
            self.cycle.transport = self.transport  # instead of this object, which refers to the cycle
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the answer that are not sent yet."""
        return self.transport.get_write_buffer_size()

    def abort(self) -> None:
        self.transport.abort()

    def take_body(self, max_bytes: int) -> bytes | None:
        """Returns the body if it has arrived completely with at most ``max_bytes``, else None: :meth:`receive_body`."""
        cycle = self.cycle
        if cycle.more_body or len(cycle.body) > max_bytes or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    async def receive_body(self, sink: BodySink) -> bool:
        """Passes the body to ``sink`` as it arrives, without a turn of this task for each part.

        Returns False if the client disconnected. Raises the GatewayError of ``sink``.
        """
        cycle, self._sink = self.cycle, sink
        if cycle.waiting_for_100_continue:
            cycle.waiting_for_100_continue = False
            self.transport.write(INTERIM_ANSWER)
        if cycle.body:
            begun, cycle.body = bytes(cycle.body), bytearray()
            self._pass(sink.add, begun)
        if self._missing >= LARGE_BYTES:
            self._direct = self._sink
        self.flow.resume_reading()
        try:
            while cycle.more_body and not cycle.disconnected and self._sink is not None:
                cycle.message_event.clear()
                await cycle.message_event.wait()
            if self._sink_error is not None:
                raise self._sink_error
        finally:
            self._sink = self._sink_error = self._direct = None
            cycle.message_event.clear()
            if cycle.more_body and not cycle.disconnected:
                self.flow.pause_reading()
        return not (cycle.more_body or cycle.disconnected)

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Returns memory for the next bytes: that of the sink, or that which all connections share."""
        if self._direct is not None:
            return self._direct.room(min(self._missing, MOST_AT_ONCE))
        is_in_body = self.cycle is not None and self.cycle.more_body
        return self._limit.room if is_in_body else self._limit.room[:HEAD_BYTES]

    def buffer_updated(self, size: int) -> None:
        if self._direct is None:
            self.data_received(bytes(self._limit.room[:size]))
            return
        self._missing -= size
        self._pass(self._direct.filled, size)
        if not self._missing:
            self._complete_request()

    def _pass(self, take: Callable[[T], None], part: T) -> None:
        try:
            take(part)
        except GatewayError as error:
            self._sink, self._direct, self._sink_error = None, None, error
            self.flow.pause_reading()
            self.cycle.message_event.set()

    def answer(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        """Sends a whole answer. ``headers`` has lower-case names and the content's length.

        Returns False if the client must first read earlier data: then send it by ASGI. Leaves the cycle in the same
        state as uvicorn does after the two messages of an answer.
        """
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected:
            return False
        cycle.response_started = cycle.response_complete = True
        limit = self._limit
        if limit.default_headers is not cycle.default_headers:
            limit.default_headers = cycle.default_headers
            limit.default_lines = b"".join([b"%b: %b\r\n" % header for header in limit.default_headers])
        lines = (STATUS_LINE[status], limit.default_lines, *[b"%b: %b\r\n" % header for header in headers])
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        if not self._held:
            self.loop.call_soon(self._write_held)
        self._held += (*lines, end, body)
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.close()
        cycle.on_response()
        return True

    def upgrade(self, protocol: ServerProtocol, headers: Sequence[Header], terms: SocketTerms) -> WebSocket:
        """Answers with the status 101 and makes the connection a WebSocket. ``headers`` has lower-case names.

        Raises InvalidRequest if the request has a body, or if the client has sent more, and ClientClosedRequest.
        """
        cycle = self.cycle
        if cycle.body or cycle.more_body or self._ahead:
            raise InvalidRequest("The client must wait for the answer before it sends more to a WebSocket.")
        if cycle.disconnected or self.is_ending:
            raise ClientClosedRequest("The client disconnected before the WebSocket was open.")
        cycle.response_started = cycle.response_complete = True
        self.transport.writelines([STATUS_LINE[101], *[b"%b: %b\r\n" % header for header in headers], b"\r\n"])
        websocket = WebSocket(self, self._limit.room, protocol, terms, self._limit.idle_websockets)
        self.transport.set_protocol(Receiver(websocket))
        self.flow.resume_reading()
        return websocket

    def data_received(self, data: bytes) -> None:
        while data and not self.is_ending:
            cycle = self.cycle
            if self._ahead or (cycle is not None and not (cycle.more_body or cycle.response_complete)):
                data = self._keep(data)
            else:
                data = self._read_body(data) if cycle is not None and cycle.more_body else self._read_head(data)
        if self.is_ending:
            self.drop(data)
        elif self.flow.read_paused:
            self.watch_for_disconnect()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _keep(self, data: bytes) -> bytes:
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES:
            self.flow.pause_reading()
        return b""

    def _read_head(self, data: bytes) -> bytes:
        """Returns the remaining bytes. An upgrade is an ordinary request, whose route may call :meth:`upgrade`."""
        begins = not self._is_in_head
        if begins:
            self._limit.idle.pop(self, None)
            self._is_in_head = True
            self.headers = None  # type: ignore[assignment]  # until the first line begins
            self.parser = httptools.HttpRequestParser(self)
        before, self._head = len(self._head), self._head + data
        found = self._head.find(END_OF_HEAD, max(before + 1 - len(END_OF_HEAD), 0))
        end = len(data) if found < 0 else found + len(END_OF_HEAD) - before
        if before + end > MAX_HEAD_BYTES:
            self._refuse(HeadersTooLarge(f"The request's line and headers are larger than {MAX_HEAD_BYTES} bytes."))
            return data
        self._head = self._head[: before + end]
        try:
            with suppress(httptools.HttpParserUpgrade):
                self.parser.feed_data(data[:end])
        except httptools.HttpParserError as exc:
            # a variable for the refusal would be a circle: its traceback leads to this frame
            self._refuse(_refusal_of(exc, self._head))
        if not self._is_in_head:
            self._head = b""
            self.state_timer.stop()
        elif begins and not self.is_ending:
            self.state_timer.start(HEAD_TIMEOUT_S, self._refuse_slow_head)
        return data[end:]

    def on_headers_complete(self) -> None:
        """Starts the application. An answer before the end of the request has ``Connection: close``."""
        length = length_of_body(self.parser.get_http_version(), self.headers)
        super().on_headers_complete()
        self.scope["state"]["connection"] = self
        self._is_in_head = False
        self._has_begun_answer = False
        cycle = self.cycle
        cycle.transport = cast("asyncio.Transport", self)
        cycle.message_event = cast("asyncio.Event", LazyEvent(is_set=False))
        self._keeps_alive = cycle.keep_alive and not self._closes_after_answer
        cycle.keep_alive = False
        self._missing, self._chunks = (0, ChunkedBody()) if length is None else (length, None)
        if length == 0:
            self._complete_request()

    def _read_body(self, data: bytes) -> bytes:
        """Returns the remaining bytes."""
        cycle = self.cycle
        try:
            if self._chunks is None:
                received, rest = data[: self._missing], data[self._missing :]
                self._missing -= len(received)
                is_complete = not self._missing
            else:
                received, rest = self._chunks.feed(data)
                is_complete = self._chunks.is_complete
        except GatewayError as error:
            if cycle.response_started:  # lets a running answer finish: the request is incomplete
                return self._keep(data)
            cycle.disconnected = True
            cycle.message_event.set()
            self._refuse(error)
            return data
        if received and self._sink is not None:
            self._pass(self._sink.add, received)
        elif received:
            super().on_body(received)
        if is_complete:
            self._complete_request()
        elif self._missing >= LARGE_BYTES and not cycle.response_started:
            self.flow.pause_reading()  # until the application has memory for the body
        elif rest:  # the event loop serves other connections first
            self._ahead += rest
            self.flow.pause_reading()
            self.loop.call_soon(self._read_ahead)
            return b""
        return rest

    def _read_ahead(self) -> None:
        if not self.is_ending:
            self.flow.resume_reading()
            ahead = bytes(self._ahead)
            self._ahead.clear()
            self.data_received(ahead)

    def _complete_request(self) -> None:
        cycle = self.cycle
        cycle.more_body = False
        cycle.message_event.set()
        self._direct = self._chunks = None
        self.parser = None  # type: ignore[assignment]  # the next head has a parser of its own
        if not cycle.response_started:
            cycle.keep_alive = self._keeps_alive

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.is_ending or self.transport.is_closing():
            return
        self.state_timer.start(self.timeout_keep_alive, self._end_silently)
        if self._ahead:
            self.loop.call_soon(self._read_ahead)  # the memory of this request is freed first
        else:
            self._limit.idle[self] = self.loop.time()
            self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Stays open for the answer to a whole request, because the client may have closed only its side.

        Otherwise the end of the client's data is a disconnect. HTTP/1.0 has no interim answers.
        """
        self._write_held()
        is_waiting = self._is_answering and not (self.cycle.more_body or self._ahead or self.is_ending)
        if not is_waiting or self.cycle.response_started or self.scope["http_version"] != "1.1":
            return False
        self.close_after_answer()
        self.watch_for_reset()
        return True

    def close_after_answer(self) -> None:
        """The next answer that begins has ``Connection: close``, and the connection is closed after it."""
        self._closes_after_answer = True
        self._keeps_alive = False
        if self._is_answering and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def end_after_answer(self) -> None:
        """Closes the connection after the answer, which may have begun."""
        self.close_after_answer()
        if self._is_answering:
            self.cycle.keep_alive = False  # of an answer that has begun, such as a stream

    def shutdown(self) -> None:
        """Closes an idle connection at once, another one after the answer to the request that is on its way."""
        self.end_after_answer()
        self._write_held()
        if self.is_ending or self._is_idle:
            self.transport.close()

    def close_if_idle(self) -> bool:
        """Closes the connection at once, unless a request has arrived or the last answer is not sent completely."""
        if self.transport.is_closing() or self._held or self.unsent_bytes or not self._is_idle:
            return False
        self.connections.discard(self)
        self._end_silently()
        return True

    @property
    def _is_idle(self) -> bool:
        is_answered = self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)
        return is_answered and not (self._is_in_head or self._ahead or has_event(self.transport, select.POLLIN))

    def _end_silently(self) -> None:
        self.end(lingers=False)

    def write(self, data: bytes) -> None:
        """Replaces the transport's method for uvicorn's answer.

        Writes the beginning of an answer, usually all of it, at the end of the event loop's turn: this needs one system
        call, and does not wake the client while other requests of this turn are processed.
        """
        if self._held:
            self._held.append(data)
        elif self.cycle.response_started and not self._has_begun_answer:
            self._has_begun_answer = True
            self._held.append(data)
            self.loop.call_soon(self._write_held)
        else:
            self.transport.write(data)

    def _write_held(self) -> None:
        held, self._held = self._held, []
        if held and not self.transport.is_closing():
            self.transport.writelines(held)

    def end(self, *, lingers: bool) -> None:
        self._write_held()
        super().end(lingers=lingers)

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def close(self) -> None:
        """Replaces the transport's method: the answer has ended."""
        self.end(lingers=self.cycle.more_body or bool(self._ahead))

    def _refuse_slow_head(self) -> None:
        if self.headers is not None:
            self._refuse(SlowRequest(f"The headers did not arrive within {HEAD_TIMEOUT_S:g} s."))
        else:
            self._end_silently()

    def _refuse(self, error: GatewayError, *, lingers: bool = True) -> None:
        """Answers without the application, and ends the connection."""
        request_id = new_request_id()
        response = self._limit.answer_of(error, request_id)
        response.headers.update({"X-Request-ID": request_id, "Connection": "close"})
        lines = [STATUS_LINE[response.status_code], *(b"%s: %s\r\n" % header for header in response.raw_headers)]
        self._held += [*lines, b"\r\n", bytes(response.body)]  # after an answer that is not written yet
        self.end(lingers=lingers)


def _refusal_of(error: httptools.HttpParserError, head: bytes) -> GatewayError:
    cause = error.__context__
    if head.startswith(_TLS_HANDSHAKE):
        return InvalidRequest("This port speaks HTTP: write http:// instead of https://.")
    return cause if isinstance(cause, GatewayError) else InvalidRequest("The request is not valid HTTP.")


def length_of_body(version: str, headers: Sequence[Header]) -> int | None:
    """Returns the length of a request's body, for headers with names in lower case; None for a chunked body.

    Makes the checks of a head that the parser lacks. Raises InvalidRequest if two servers could disagree about the
    request's host or its end.
    """
    if version not in VERSIONS:
        raise InvalidRequest("The gateway speaks HTTP/1.1 and HTTP/1.0.")
    hosts: list[bytes] = []
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    wanted = {b"host": hosts, b"content-length": lengths, b"transfer-encoding": encodings}
    for name, value in headers:
        if name in wanted:
            wanted[name].append(value.strip(b" \t"))
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise InvalidRequest("The request must have exactly one Host header.")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidRequest("The Host header is not a valid host.")
    if encodings:
        if version == "1.0" or lengths or [encoding.lower() for encoding in encodings] != [b"chunked"]:
            raise InvalidRequest("The only Transfer-Encoding is 'chunked', in HTTP/1.1, without a Content-Length.")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise InvalidRequest("The request must have one Content-Length, a number.")
    return int(lengths[0])
