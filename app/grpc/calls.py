"""The calls of the client: one response, or a stream of responses."""

import asyncio
import time

from app.grpc.connection import Http2Connection
from app.grpc.frames import DataReceived, Headers, HeadersReceived
from app.grpc.messages import PREFIX_BYTES, MessageReader, error_of_head, error_of_trailers
from app.grpc.rpc import LATER_S, WAITED_S, BrokenExchange, RpcError


class Http2Call:
    """Base class of unary calls and streams: end, deadline, cancellation and receive window."""

    __slots__ = ("_changed", "_connection", "_error", "_interruption", "_is_over", "_reader", "_stream_id", "_timer")

    def __init__(self, connection: Http2Connection, max_message_bytes: int) -> None:
        self._connection = connection
        self._reader = MessageReader(max_message_bytes)
        self._stream_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._error: RpcError | None = None
        self._interruption: Exception | None = None
        self._changed: asyncio.Future[None] | None = None

    def start(self, header_block: bytes, message: bytes, timeout_s: float) -> None:
        self._stream_id = self._connection.start(self, header_block, message)
        self._timer = self._connection.loop.call_later(timeout_s, self._expire)

    def done(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """Cancels the call and tells the server. A no-op for a call that has ended."""
        if not self._is_over:
            self._stop(RpcError("CANCELLED", "the caller cancelled the call"))

    def received_headers(self, event: HeadersReceived) -> None:
        if event.is_end:
            self._finish(event.headers)
        elif (error := error_of_head(event.headers)) is not None:
            self._stop(error)

    def received_data(self, event: DataReceived) -> None:
        try:
            self._take(event)
        except RpcError as exc:
            self._stop(exc)
            return
        if event.is_end:
            self._finish(())

    def _take(self, event: DataReceived) -> None:
        """Raises RpcError."""
        raise NotImplementedError

    def _finish(self, trailers: Headers) -> None:
        error: RpcError | None = error_of_trailers(trailers)
        if error is None and not self._reader.is_between_messages:
            error = BrokenExchange("the response ended inside a message")
        self.failed(error)

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
        self._connection.cancel(self._stream_id)
        self.failed(error)

    def failed(self, error: RpcError | None) -> None:
        """Ends the call. Only the first end counts. ``error``: None for the status OK."""
        if self._is_over:
            return
        self._is_over = True
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    async def _change(self) -> None:
        """Waits until :meth:`_wake`. Cancelling this wait does not cancel the call."""
        self._changed = self._connection.loop.create_future()
        await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _await_message(self) -> bool:
        """Lets the server send the rest of the current message. Returns whether the window was too small for it."""
        return self._connection.session.await_bytes(self._stream_id, self._reader.missing)


class Http2UnaryCall(Http2Call):
    """A call with one response message."""

    __slots__ = ("_message",)

    def __init__(self, connection: Http2Connection, max_message_bytes: int) -> None:
        super().__init__(connection, max_message_bytes)
        self._message: bytes | None = None

    async def response(self) -> bytes:
        """The response message. Cancelling this wait does not cancel the call. Raises RpcError."""
        while not self._is_over:
            if self._interruption is not None:
                interruption, self._interruption = self._interruption, None
                raise interruption
            await self._change()
        if self._error is not None:
            raise self._error
        if self._message is None:
            raise BrokenExchange("the server sent no message")
        return self._message

    def _take(self, event: DataReceived) -> None:
        for message in self._reader.messages(event.data):
            if self._message is not None:
                raise BrokenExchange("the server sent two messages for one request")
            self._message = message
        self._connection.session.acknowledge(self._stream_id, event.size)
        if self._message is None:
            self._await_message()


class Http2StreamCall(Http2Call):
    """A call with any number of response messages.

    The receive window reopens only when messages are read, so a stalled reader costs at most one window of memory.
    """

    __slots__ = ("_asked", "_is_timed", "_messages", "arrived", "gap_s", "is_behind", "waits_since")

    def __init__(self, connection: Http2Connection, max_message_bytes: int) -> None:
        super().__init__(connection, max_message_bytes)
        self.arrived: float | None = None
        self.gap_s: float | None = None
        self.is_behind = False
        self.waits_since: float | None = None
        self._asked: float | None = None
        self._is_timed = False
        self._messages: list[bytes] = []

    def __aiter__(self) -> "Http2StreamCall":
        return self

    async def __anext__(self) -> bytes:
        """Returns a buffered message at once. Cancelling this wait does not cancel the call.

        Raises RpcError, or the error of :meth:`interrupt`.
        """
        while not self._messages:
            if self._is_over:
                raise self._error or StopAsyncIteration
            if self._await_message():
                self._note_delay()
                self._asked = None  # the time until the message is complete does not show the model's pace
            else:
                self._asked = time.monotonic()
            self._connection.flush()
            self.waits_since = time.monotonic()
            try:
                await self._change()
            finally:
                self.waits_since = None
                interruption, self._interruption = self._interruption, None
            if interruption is not None and not self._messages:
                raise interruption
        message = self._messages.pop(0)
        if not self._is_over:
            session = self._connection.session
            if session.receive_window(self._stream_id) < session.limits.stream_window // 4:
                self._note_delay()
            session.acknowledge(self._stream_id, len(message) + PREFIX_BYTES)
            self._connection.flush()
        return message

    def time_arrivals(self) -> None:
        self._is_timed = True
        if not self._is_over:
            self._connection.read_at_once(self._stream_id)

    @property
    def is_receiving(self) -> bool:
        return not self._is_over and not self._reader.is_between_messages

    def interrupt(self, error: Exception) -> None:
        if self.waits_since is not None:
            super().interrupt(error)

    def close(self) -> None:
        """Discards the messages that were not read."""
        self._messages.clear()

    def _take(self, event: DataReceived) -> None:
        before = len(self._messages)
        self._messages.extend(self._reader.messages(event.data))
        padding = event.size - len(event.data)
        if padding:
            self._connection.session.acknowledge(self._stream_id, padding)
        if count := len(self._messages) - before:
            if self.arrived is None and not self._is_timed:
                self._connection.may_rest(self._stream_id)
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
            self._await_message()

    def _note_delay(self) -> None:
        """Notes that the server may have been blocked, because the window was nearly closed until this read."""
        if time.monotonic() - (self.arrived or 0.0) > WAITED_S:
            self.is_behind = True
