"""The calls of the client: one response, or a stream of responses."""

import asyncio
import time
from collections import deque

from app.triton.grpc.connection import Connection
from app.triton.grpc.events import Headers
from app.triton.grpc.messages import PREFIX_BYTES, MessageReader
from app.triton.grpc.status import error_of_trailers
from app.triton.transport import WAITED_S, BrokenExchange, RpcError


class Call:
    """What unary calls and streams share: the end, the deadline and the cancellation."""

    def __init__(self, connection: Connection, max_message_bytes: int) -> None:
        self._connection = connection
        self._reader = MessageReader(max_message_bytes)
        self._stream_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def start(self, header_block: bytes, body: bytes, timeout_s: float) -> None:
        self._stream_id = self._connection.start(self, header_block, body)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def done(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """Tells the server. A no-op for a call that has ended."""
        if not self._is_over:
            self._stop(RpcError("CANCELLED", "the caller cancelled the call"))

    def failed(self, error: RpcError) -> None:
        """The connection ended the call."""
        self._end(error)

    def received_headers(self, headers: Headers, *, is_end: bool) -> None:
        if is_end:
            self._finish(headers)

    def received_data(self, data: bytes, size: int, *, is_end: bool) -> None:
        try:
            self._take(data, size)
        except RpcError as exc:
            self._stop(exc)
            return
        if is_end:
            self._finish(())

    def _take(self, data: bytes, size: int) -> None:
        """Raises RpcError."""
        raise NotImplementedError

    def _ended(self, error: RpcError | None) -> None:
        """Called once. None: the status was OK."""
        raise NotImplementedError

    def _finish(self, trailers: Headers) -> None:
        error: RpcError | None = error_of_trailers(trailers)
        if error is None and not self._reader.is_between_messages:
            error = BrokenExchange("the response ended inside a message")
        self._end(error)

    def _expire(self) -> None:
        self._stop(RpcError("DEADLINE_EXCEEDED", "the deadline passed"))

    def _stop(self, error: RpcError) -> None:
        self._connection.cancel(self._stream_id)
        self._end(error)

    def _end(self, error: RpcError | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._ended(error)


class UnaryCall(Call):
    """A call with one response message."""

    def __init__(self, connection: Connection, max_message_bytes: int) -> None:
        super().__init__(connection, max_message_bytes)
        self._message: bytes | None = None
        self._result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def response(self) -> bytes:
        """The response message. Cancelling this wait does not cancel the call. Raises RpcError."""
        return await self._result

    def _take(self, data: bytes, size: int) -> None:
        for message in self._reader.messages(data):
            if self._message is not None:
                raise BrokenExchange("the server sent two messages for one request")
            self._message = message
        # Nobody waits for parts of a message: the window is opened for the rest of it at once.
        self._connection.session.acknowledge(self._stream_id, size)

    def _ended(self, error: RpcError | None) -> None:
        if self._result.done():
            return
        if error is None and self._message is None:
            error = BrokenExchange("the server sent no message")
        if error is not None:
            self._result.set_exception(error)
        else:
            self._result.set_result(self._message or b"")


class StreamCall(Call):
    """A call with any number of response messages.

    The stream's receive window is given back as the messages are taken: a reader that stalls costs one window.
    """

    def __init__(self, connection: Connection, max_message_bytes: int) -> None:
        super().__init__(connection, max_message_bytes)
        self.arrived: float | None = None
        self.gap_s: float | None = None
        self.is_behind = False
        self._asked: float | None = None
        self._messages: deque[bytes] = deque()
        self._granted = 0
        self._error: RpcError | None = None
        self._changed: asyncio.Future[None] | None = None

    def __aiter__(self) -> "StreamCall":
        return self

    async def __anext__(self) -> bytes:
        """Cancelling this wait does not cancel the call. Raises RpcError."""
        while not self._messages:
            if self._is_over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._grant_missing()
            self._asked = time.monotonic()
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        self._note_delay()
        message = self._messages.popleft()
        self._acknowledge(len(message) + PREFIX_BYTES)
        return message

    def close(self) -> None:
        """Frees the messages that nobody takes."""
        self._messages.clear()

    def _take(self, data: bytes, size: int) -> None:
        for message in self._reader.messages(data):
            self._messages.append(message)
            self._note_arrival()
        self._acknowledge(size - len(data))
        if self._messages:
            self._wake()
        else:
            self._grant_missing()

    def _grant_missing(self) -> None:
        """A message larger than the window can only arrive whole if the window is opened for it."""
        missing = self._reader.missing - self._granted
        if missing > self._connection.session.limits.stream_window // 2:
            self._granted += missing
            self._connection.session.grant(self._stream_id, missing)
            self._connection.flush()

    def _acknowledge(self, size: int) -> None:
        used = min(self._granted, size)
        self._granted -= used
        self._connection.session.acknowledge(self._stream_id, size - used)
        self._connection.flush()

    def _note_arrival(self) -> None:
        now = time.monotonic()
        if self._asked is not None and now - self._asked >= WAITED_S:
            self.is_behind = False
        self._asked = None
        if self.arrived is not None:
            self.gap_s = now - self.arrived
        self.arrived = now

    def _note_delay(self) -> None:
        """The server may hold messages back if the window stayed nearly closed until the reader came."""
        if self._is_over:
            return
        session = self._connection.session
        is_nearly_closed = session.receive_window(self._stream_id) < session.limits.stream_window // 4
        self.is_behind |= is_nearly_closed and time.monotonic() - (self.arrived or 0.0) > WAITED_S

    def _ended(self, error: RpcError | None) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
