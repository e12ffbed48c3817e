"""The calls of the client: one response, or a stream of responses.

Sources: PROTOCOL-HTTP2.md of gRPC ("Length-Prefixed-Message", "Errors") and http-grpc-status-mapping.md.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from urllib.parse import unquote_to_bytes

from app.grpc.connection import PREFIX, Http2Connection
from app.grpc.frames import REFUSED_STREAM, Headers
from app.grpc.http2_session import Http2Stream
from app.grpc.rpc import LATER_S, STATUSES, WAITED_S, BrokenExchange, RpcError

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


def _error_of_trailers(trailers: Headers) -> RpcError | None:
    """Returns the error in the trailers, or None for the status OK."""
    fields = dict(trailers)
    number = fields.get(b"grpc-status")
    if number == b"0":
        return None
    if number is None:
        return _error_of_http(fields.get(b":status", b""))
    code = STATUSES[int(number)] if number.isdigit() and len(number) < 3 and int(number) < len(STATUSES) else "UNKNOWN"
    text = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return RpcError(code, text, is_answer=True)


def _error_of_http(status: bytes) -> RpcError:
    if status in (b"", b"200"):
        return BrokenExchange("the response has no gRPC status")
    return RpcError(
        _CODE_BY_HTTP_STATUS.get(status, "UNKNOWN"), f"the server answered with HTTP status {status.decode('latin-1')}"
    )


class Http2Call(Http2Stream):
    """Base class of unary calls and streams: end, deadline, cancellation and receive window."""

    __slots__ = ("_changed", "_connection", "_error", "_interruption", "_is_over", "_messages", "_reader", "_timer")

    def __init__(self, connection: Http2Connection, max_message_bytes: int) -> None:
        self._connection = connection
        self._reader = MessageReader(max_message_bytes)
        self._messages: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._error: RpcError | None = None
        self._interruption: Exception | None = None
        self._changed: asyncio.Future[None] | None = None

    def start(self, header_block: bytes, message: bytes, timeout_s: float) -> None:
        self._connection.start(self, header_block, message)
        self._timer = self._connection.loop.call_later(timeout_s, self._expire)

    def done(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """Cancels the call and tells the server. A no-op for a call that has ended."""
        if not self._is_over:
            self._stop(RpcError("CANCELLED", "the caller cancelled the call"))

    def received_headers(self, headers: Headers, is_end: bool) -> None:
        if is_end:
            error = _error_of_trailers(headers)
            if error is None and not self._reader.is_between_messages:
                error = BrokenExchange("the response ended inside a message")
            self._end(error)
        elif (b":status", b"200") not in headers:
            status = dict(headers).get(b":status", b"")
            if not status.startswith(b"1"):  # an interim response; any other is from a proxy, not a gRPC server
                self._stop(_error_of_http(status))

    def received_data(self, data: bytes, size: int, is_end: bool) -> None:
        before = len(self._messages)
        try:
            self._messages.extend(self._reader.messages(data))
            self._received(len(self._messages) - before, size, size - len(data))
        except RpcError as exc:
            self._stop(exc)
        if is_end:
            self._end(_error_of_trailers(()))

    def _received(self, count: int, size: int, padding: int) -> None:
        """Receives data with ``count`` new messages, of ``size`` bytes with padding. Raises RpcError."""
        raise NotImplementedError

    def was_reset(self, code: int, reason: str) -> None:
        details = reason or f"the server reset the stream with HTTP/2 error {code}"
        self._end(RpcError(_CODE_BY_RESET.get(code, "INTERNAL"), details, was_sent=code != REFUSED_STREAM))

    def was_lost(self, reason: str) -> None:
        self._end(RpcError("UNAVAILABLE", reason))

    def interrupt(self, error: Exception) -> None:
        """Raises ``error`` in the caller's wait; the call goes on."""
        self._interruption = error
        self._wake()

    def _expire(self) -> None:
        """Ends the caller's wait. The caller knows when the server can handle a cancellation."""
        error = RpcError("DEADLINE_EXCEEDED", "the deadline passed")
        self._timer = self._connection.loop.call_later(LATER_S, self._stop, error)
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
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
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

    def _received(self, count: int, size: int, padding: int) -> None:
        if len(self._messages) > 1:
            raise BrokenExchange("the server sent two messages for one request")
        self._connection.session.acknowledge(self, size)
        if not self._messages:
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
            self._connection.read_at_once(self)

    @property
    def is_receiving(self) -> bool:
        return not self._is_over and not self._reader.is_between_messages

    def interrupt(self, error: Exception) -> None:
        if self.waits_since is not None:
            super().interrupt(error)

    def close(self) -> None:
        """Discards the messages that were not read."""
        self._messages.clear()

    def _received(self, count: int, size: int, padding: int) -> None:
        if padding:
            self._connection.session.acknowledge(self, padding)
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
        if self._messages:
            self._wake()
        elif self._changed is not None and not self._changed.done():
            self._connection.session.await_bytes(self, self._reader.missing)

    def _note_delay(self) -> None:
        """Notes that the server may have been blocked, because the window was nearly closed until this read."""
        if time.monotonic() - (self.arrived or 0.0) > WAITED_S:
            self.is_behind = True
