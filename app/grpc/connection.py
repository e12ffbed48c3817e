"""One HTTP/2 connection on asyncio, which passes bytes between transport and session, and its calls.

Sources: PROTOCOL-HTTP2.md of gRPC ("Length-Prefixed-Message", "Errors") and http-grpc-status-mapping.md.
"""

import asyncio
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from app.grpc.frames import REFUSED_STREAM, ConnectionFailed, Headers
from app.grpc.http2_session import Http2Stream, Session
from app.grpc.rpc import LATER_S, STATUSES, WAITED_S, BrokenExchange, RpcError

CLOSE_S = 1.0
_FEW = 4
"""Up to this many output parts are joined. A large body is written without a copy."""
_PING = b"gateway!"
BUSY_GAP_S = 0.001
"""Streams whose responses arrive with smaller gaps are read with pauses, so that one read has several responses."""
REST_S = 0.0025
"""The pause between two reads of such streams."""
_SMALL_READ_BYTES = 4096
"""A larger read is part of a large response, or already has many responses."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Pings after ``interval_s`` without received bytes; the connection fails without an answer in ``timeout_s``."""

    interval_s: float
    timeout_s: float
    without_calls: bool = False
    network_s: float = 20.0
    """The connection fails if TCP gets no acknowledgement of sent bytes, or of a probe while it is idle, for this time.
    Servers do not see the probes, so they may be more frequent than pings."""


class Http2Connection(asyncio.Protocol):
    """Open from ``connection_made`` until ``is_open`` is False. Calls on a lost connection fail with UNAVAILABLE."""

    _transport: asyncio.Transport
    """Set by ``connection_made``."""

    def __init__(self, session: Session, keep_alive: KeepAlive) -> None:
        self.session = session
        self.is_open = False
        self.loop = asyncio.get_running_loop()
        self._keep_alive = keep_alive
        self._received_at = 0.0
        self._heard_at = 0.0
        """When bytes arrived last, or reading began again."""
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self.awaited: set[Http2Stream] = set()
        """The calls whose next response must be read at once. There are no pauses while there are any."""
        self._rest: asyncio.TimerHandle | None = None
        """Ends the pause between two reads."""
        self._will_flush = False
        """Whether the output will be flushed at the end of this turn of the event loop."""
        self._lost: asyncio.Future[None] = self.loop.create_future()

    async def room(self) -> None:
        """Waits until a call can start, or until the connection no longer accepts calls."""
        while not (self.session.is_closing or self.session.has_room):
            self._room.clear()
            await self._room.wait()

    def start(self, call: "Http2Call", header_block: bytes, message: bytes, timeout_s: float) -> None:
        """Sends the request of a call at the end of this turn of the event loop, with those of all calls of the turn.

        A write for each call would wake the server early.
        """
        self.session.open(call, header_block, message, PREFIX.pack(0, len(message)))
        call.timer = self.loop.call_later(timeout_s, call.expire)
        self.awaited.add(call)
        if self._rest is not None:
            self.end_rest()
        if not self._will_flush:
            self._will_flush = True
            self.loop.call_soon(self.flush)

    def cancel(self, call: Http2Stream) -> None:
        """Ends a call for the server. The call gets no further events."""
        if self.session.reset(call):
            self.awaited.discard(call)
            self.flush()
            self._room.set()
            self._close_if_done()

    def flush(self) -> None:
        """Writes the session's output now. A no-op for a lost connection."""
        self._will_flush = False
        output = self.session.output
        if output and self.is_open:
            self.session.output = []
            if len(output) <= _FEW:
                self._transport.write(b"".join(output))
            else:
                self._transport.writelines(output)

    async def close(self) -> None:
        """Closes the connection; running calls fail."""
        if self.is_open:
            self._close()
            await asyncio.wait({self._lost}, timeout=CLOSE_S)

    def _close(self) -> None:
        self.session.close()
        self.flush()
        self._transport.close()

    def _close_if_done(self) -> None:
        """Closes a connection without calls that accepts no new ones: after GOAWAY, or without further stream ids."""
        if self.session.is_closing and not self.session.streams and self.is_open:
            self._close()

    def fail(self, reason: str) -> None:
        """Aborts the connection at once; running calls fail with UNAVAILABLE."""
        self._transport.abort()
        self._end(reason)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_open = True
        self.flush()
        self._received_at = time.monotonic()
        self._timer = self.loop.call_later(self._keep_alive.interval_s, self._ping_if_silent)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        may_rest = now - self._heard_at < BUSY_GAP_S and len(data) < _SMALL_READ_BYTES
        self._received_at = self._heard_at = now
        try:
            self.session.receive(data)
        except ConnectionFailed as exc:
            self.session.close(exc.code)
            self.flush()
            self.fail(f"the server broke the protocol: {exc}")
            return
        self.flush()
        if not self._room.is_set():
            self._room.set()
        if self.session.is_closing:
            self._close_if_done()
        is_busy = may_rest and self.session.streams and not (self.awaited or self._rest)
        if is_busy and self.is_open and not self._transport.is_closing():
            # While it rests, a TLS transport may still pass on received bytes.
            self._transport.pause_reading()
            self._rest = self.loop.call_later(REST_S, self.end_rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was lost: {exc}" if exc else "the connection was closed")

    def end_rest(self) -> None:
        """Reads again. A no-op if reading is not paused."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
            self._heard_at = time.monotonic()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _ping_if_silent(self, asked_at: float = 0.0) -> None:
        """Fails the connection if no bytes arrived since the ping at ``asked_at``.

        The answer may be queued behind a large response.
        """
        if self._received_at < asked_at:
            self.fail("the server did not answer a ping")
            return
        now, keep_alive = time.monotonic(), self._keep_alive
        silent_s = now - self._received_at
        if silent_s >= keep_alive.interval_s and (keep_alive.without_calls or self.session.streams):
            self.session.ping(_PING)
            self.flush()
            self._timer = self.loop.call_later(keep_alive.timeout_s, self._ping_if_silent, now)
        else:
            wait_s = max(keep_alive.interval_s - silent_s, keep_alive.timeout_s)
            self._timer = self.loop.call_later(wait_s, self._ping_if_silent)

    def _end(self, reason: str) -> None:
        self.is_open, self.session.is_closing = False, True
        if self._timer is not None:
            self._timer.cancel()
        self._room.set()
        if self._rest is not None:
            self._rest.cancel()
        calls, self.session.streams = self.session.streams, {}
        for call in calls.values():
            call.was_reset(None, reason)
        if not self._lost.done():
            self._lost.set_result(None)


_CODE_BY_HTTP_STATUS = {
    b"400": "INTERNAL",
    b"401": "UNAUTHENTICATED",
    b"403": "PERMISSION_DENIED",
    b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE",
    b"502": "UNAVAILABLE",
    b"503": "UNAVAILABLE",
    b"504": "UNAVAILABLE",
}
_CODE_BY_RESET = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}


def _error_of_http(status: bytes) -> RpcError:
    if status in (b"", b"200"):
        return BrokenExchange("the response has no gRPC status")
    return RpcError(
        _CODE_BY_HTTP_STATUS.get(status, "UNKNOWN"), f"the server answered with HTTP status {status.decode('latin-1')}"
    )


PREFIX = struct.Struct(">BI")
"""What comes before each message: whether it is compressed, and its length."""
PREFIX_BYTES = PREFIX.size


class MessageReader:
    """Assembles messages from pieces of a stream's body. Each message is copied once, when it is complete."""

    __slots__ = ("_has_prefix", "_max_message_bytes", "_pieces", "is_between_messages", "missing")

    def __init__(self, max_message_bytes: int) -> None:
        self.missing = PREFIX_BYTES
        """Bytes that are missing from the current message, or from its prefix while the length is unknown."""
        self.is_between_messages = True
        self._max_message_bytes = max_message_bytes
        self._has_prefix = False
        self._pieces: list[bytes] = []
        """The received pieces of the message or its prefix."""

    def messages(self, data: bytes) -> Iterable[bytes]:
        """Returns the messages that ``data`` completes. They may be yielded one by one, and then raise RpcError."""
        if self.is_between_messages and len(data) > PREFIX_BYTES:
            is_compressed, length = PREFIX.unpack_from(data)
            if length == len(data) - PREFIX_BYTES and length <= self._max_message_bytes and not is_compressed:
                return (data[PREFIX_BYTES:],)  # the usual piece: one whole message
        return self._assembled(data)

    def _assembled(self, data: bytes) -> Iterator[bytes]:
        start, size = 0, len(data)
        while size - start >= self.missing:
            end = start + self.missing
            part = data[start:end]
            if self._pieces:
                part, self._pieces = b"".join((*self._pieces, part)), []
            start = end
            if self._has_prefix:
                self._has_prefix, self.missing = False, PREFIX_BYTES
                yield part
                continue
            is_compressed, length = PREFIX.unpack(part)
            if is_compressed:
                raise BrokenExchange("the server sent a compressed message, which the client does not support")
            if length > self._max_message_bytes:
                text = f"a message of {length} bytes; at most {self._max_message_bytes} are read"
                raise RpcError("RESOURCE_EXHAUSTED", text)
            self._has_prefix, self.missing = True, int(length)
        if start < size:
            self.missing -= size - start
            self._pieces.append(data[start:])
        self.is_between_messages = not self._has_prefix and self.missing == PREFIX_BYTES


class Http2Call(Http2Stream):
    """Base class of unary calls and streams: end, deadline, cancellation and receive window."""

    __slots__ = ("_changed", "_connection", "_error", "_interruption", "_is_over", "_messages", "_reader", "timer")

    def __init__(self, connection: Http2Connection, max_message_bytes: int) -> None:
        self._connection = connection
        self._reader = MessageReader(max_message_bytes)
        self._messages: list[bytes] = []
        self.timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._error: RpcError | None = None
        self._interruption: Exception | None = None
        self._changed: asyncio.Future[None] | None = None

    def done(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """Cancels the call and tells the server. A no-op for a call that has ended."""
        if not self._is_over:
            self._stop(RpcError("CANCELLED", "the caller cancelled the call"))

    def received_headers(self, headers: Headers, is_end: bool) -> None:
        if is_end:
            error: RpcError | None = None
            fields = dict(headers)
            number = fields.get(b"grpc-status")
            if number is None:
                error = _error_of_http(fields.get(b":status", b""))
            elif number != b"0":
                is_known = number.isdigit() and len(number) < 3 and int(number) < len(STATUSES)
                text = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
                error = RpcError(STATUSES[int(number)] if is_known else "UNKNOWN", text, is_answer=True)
            elif not self._reader.is_between_messages:
                error = BrokenExchange("the response ended inside a message")
            self._end(error)
        elif (b":status", b"200") not in headers:
            status = dict(headers).get(b":status", b"")
            if not status.startswith(b"1"):  # an interim response; any other is from a proxy, not a gRPC server
                self._stop(_error_of_http(status))

    def was_reset(self, code: int | None, reason: str) -> None:
        details = reason or f"the server reset the stream with HTTP/2 error {code}"
        name = "UNAVAILABLE" if code is None else _CODE_BY_RESET.get(code, "INTERNAL")
        self._end(RpcError(name, details, was_sent=code != REFUSED_STREAM))

    def interrupt(self, error: Exception) -> None:
        """Raises ``error`` in the caller's wait; the call goes on."""
        self._interruption = error
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def expire(self) -> None:
        """Ends the caller's wait. The caller knows when the server can handle a cancellation."""
        error = RpcError("DEADLINE_EXCEEDED", "the deadline passed")
        self.timer = self._connection.loop.call_later(LATER_S, self._stop, error)
        self.interrupt(error)

    def _stop(self, error: RpcError) -> None:
        self._connection.cancel(self)
        self._end(error)

    def _end(self, error: RpcError | None) -> None:
        """Ends the call. Only the first end counts. ``error``: None for the status OK."""
        if self._is_over:
            return
        self._is_over = True
        self._connection.awaited.discard(self)
        self._error = error
        if self.timer is not None:
            self.timer.cancel()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Http2UnaryCall(Http2Call):
    """A call with one response message."""

    __slots__ = ()

    async def response(self) -> bytes:
        """The response message. Cancelling this wait does not cancel the call. Raises RpcError."""
        while not self._is_over:
            if self._interruption is not None:
                interruption, self._interruption = self._interruption, None
                raise interruption
            self._changed = self._connection.loop.create_future()
            await self._changed
        if self._error is not None:
            raise self._error
        if not self._messages:
            raise BrokenExchange("the server sent no message")
        return self._messages[0]

    def received_data(self, data: bytes, size: int, is_end: bool) -> None:
        try:
            self._messages.extend(self._reader.messages(data))
            if len(self._messages) > 1:
                raise BrokenExchange("the server sent two messages for one request")
        except RpcError as exc:
            self._stop(exc)
        if is_end:
            self._end(_error_of_http(b""))
        elif not self._messages:
            self._connection.session.acknowledge(self, size)
            self._connection.session.await_bytes(self, self._reader.missing)


class Http2StreamCall(Http2Call):
    """A call with any number of response messages.

    The receive window reopens only when messages are read, so a stalled reader costs at most one window of memory.
    """

    __slots__ = ("_asked", "_is_timed", "arrived", "gap_s", "is_behind", "waits_since")

    def __init__(self, connection: Http2Connection, max_message_bytes: int) -> None:
        super().__init__(connection, max_message_bytes)
        self.arrived: float | None = None
        self.gap_s: float | None = None
        self.is_behind = False
        self.waits_since: float | None = None
        self._asked: float | None = None
        self._is_timed = False

    def __aiter__(self) -> "Http2StreamCall":
        return self

    async def __anext__(self) -> bytes:
        """Returns a buffered message at once. Cancelling this wait does not cancel the call.

        Raises RpcError, or the error of :meth:`interrupt`.
        """
        while not self._messages:
            if self._is_over:
                raise self._error or StopAsyncIteration
            if self._connection.session.await_bytes(self, self._reader.missing):
                self._note_delay()
                self._asked = None  # the time until the message is complete does not show the model's pace
            else:
                self._asked = time.monotonic()
            self._connection.flush()
            self.waits_since = time.monotonic()
            try:
                self._changed = self._connection.loop.create_future()
                await self._changed
            finally:
                self.waits_since = None
                interruption, self._interruption = self._interruption, None
            if interruption is not None and not self._messages:
                raise interruption
        message = self._messages.pop(0)
        if not self._is_over:
            session = self._connection.session
            if self.receive_window < session.stream_window // 4:
                self._note_delay()
            session.acknowledge(self, len(message) + PREFIX_BYTES)
            self._connection.flush()
        return message

    def time_arrivals(self) -> None:
        self._is_timed = True
        if not self._is_over:
            self._connection.awaited.add(self)
            self._connection.end_rest()

    @property
    def is_receiving(self) -> bool:
        return not self._is_over and not self._reader.is_between_messages

    def interrupt(self, error: Exception) -> None:
        if self.waits_since is not None:
            super().interrupt(error)

    def close(self) -> None:
        """Discards the messages that were not read."""
        self._messages.clear()

    def received_data(self, data: bytes, size: int, is_end: bool) -> None:
        before = len(self._messages)
        try:
            self._messages.extend(self._reader.messages(data))
        except RpcError as exc:
            self._stop(exc)
        count = len(self._messages) - before
        if size > len(data):  # padding
            self._connection.session.acknowledge(self, size - len(data))
        if count:
            if self.arrived is None and not self._is_timed:
                self._connection.awaited.discard(self)
            now = time.monotonic()
            if self._asked is not None and now - self._asked >= WAITED_S:
                self.is_behind = False
            self._asked = None
            if count > 1:  # they arrived together
                self.gap_s = 0.0
            elif self.arrived is not None:
                self.gap_s = now - self.arrived
            self.arrived = now
        if self._changed is not None and not self._changed.done():  # a reader waits
            if self._messages:
                self._changed.set_result(None)
            else:
                self._connection.session.await_bytes(self, self._reader.missing)
        if is_end:
            self._end(_error_of_http(b""))

    def _note_delay(self) -> None:
        """Notes that the server may have been blocked, because the window was nearly closed until this read."""
        if time.monotonic() - (self.arrived or 0.0) > WAITED_S:
            self.is_behind = True
