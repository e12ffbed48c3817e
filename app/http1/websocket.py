"""One WebSocket on a connection of HTTP/1.1: messages, back pressure, pings, limits and the end (decision 4).

The library `websockets` reads the frames and writes all but those of messages, without I/O.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from struct import pack
from typing import Self

from msgspec import Struct
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from app.core.aio import LeakyBucket
from app.core.errors import ClientClosedRequest, GatewayError, SlowConsumer, TooManyRequests
from app.http1.closing import ClosingProtocol, Timer

CONTROL_FRAMES_PER_S = 20
CONTROL_FRAMES_AT_ONCE = 200
MAX_FRAGMENTS = 16 * 1024
"""Limit of the fragments of one message."""
MAX_AHEAD_MESSAGES = 16
MAX_AHEAD_BYTES = 64 * 1024
"""Limits of the messages that wait to be taken. Above one of them, reading pauses."""
FRAMES_BYTES = 4 * 1024
"""The most bytes that are received at once, up to 2,000 frames. A large frame gets more."""
CLOSE_S = 3.0
"""How long the client may take to answer a close frame."""

_WHOLE_TEXT = 0x80 | Opcode.TEXT
_TWO_BYTES, _EIGHT_BYTES = 126, 127
"""Instead of a length: it has so many bytes, and follows."""


class Reason(StrEnum):
    """Why a WebSocket ended, with the close code (RFC 6455, section 7.4, and its registry); 0: the client ended it."""

    code: int

    def __new__(cls, text: str, code: int = 0) -> Self:
        reason = str.__new__(cls, text)
        reason._value_, reason.code = text, code
        return reason


class CloseReason(Reason):
    """The reasons of the connection itself. An application adds its own, with codes from 4000 on."""

    CLIENT = "client"
    LOST = "lost"
    DRAINING = "draining", 1001
    PROTOCOL_ERROR = "protocol_error", 1002
    INVALID_TEXT = "invalid_text", 1007
    SLOW_CONSUMER = "slow_consumer", 1008
    SLOW_MESSAGE = "slow_message", 1008
    TOO_MANY_FRAMES = "too_many_frames", 1008
    TOO_LARGE = "payload_too_large", 1009
    PING_TIMEOUT = "ping_timeout", 1011
    INTERNAL = "internal", 1011
    TOO_MANY_REQUESTS = "too_many_requests", 1013
    IDLE = "idle", 1013


_REASON_OF_LIBRARY = {
    each.code: each
    for each in (CloseReason.PROTOCOL_ERROR, CloseReason.INVALID_TEXT, CloseReason.TOO_LARGE, CloseReason.INTERNAL)
}
"""By the code of the ends that the library decides."""


def cause_of(reason: Reason) -> GatewayError:
    """The error of the requests that the end of their WebSocket cancels."""
    if reason is CloseReason.SLOW_CONSUMER:
        return SlowConsumer("The client did not read the WebSocket.")
    return ClientClosedRequest(f"The WebSocket ended: {reason}.")


class Message(Struct, frozen=True, eq=False):
    """A whole message. The bytes count as memory of its WebSocket until ``release`` is called."""

    data: bytes
    is_text: bool
    release: Callable[[], None]


class SocketTerms(Struct, frozen=True, eq=False):
    """The limits of one WebSocket.

    ``send_s``: time limit for a client to make progress with reading; ``stall_s``: the same while an answer waits for
    the client; ``message_s``: time limit for a whole message to arrive. ``hold`` counts received bytes, or raises
    TooManyRequests; ``release`` gives them back.
    """

    ping_s: float
    send_s: float
    stall_s: float
    message_s: float
    hold: Callable[[int], None]
    release: Callable[[int], None]


class WebSocket:
    """One WebSocket. ``reason`` is None while it is open.

    ``on_closed`` is called once when no further message can be received or sent. ``is_behind`` returns whether an
    answer waits for this client to read.

    ``room``: memory for received bytes. ``idle``: the WebSockets without a message that runs, the longest idle
    one first, and since when.
    """

    def __init__(
        self,
        connection: ClosingProtocol,
        room: memoryview,
        protocol: ServerProtocol,
        terms: SocketTerms,
        idle: dict["WebSocket", float],
    ) -> None:
        self.on_closed: Callable[[], None] | None = None
        self.is_behind: Callable[[], bool] = bool
        self.reason: Reason | None = None
        self._connection = connection
        self._transport = connection.transport
        self._room = room
        self._protocol = protocol
        self._terms = terms
        self._loop = connection.loop
        self._idle = idle
        self._idle[self] = self._loop.time()
        self._unanswered = 0
        self._messages: deque[Message] = deque()
        self._ahead_bytes = 0
        self._is_stopped = False
        self._arrived = asyncio.Event()
        """Set when a message has arrived, or no further message can arrive."""
        self._ended = asyncio.Event()
        self._opcode = Opcode.TEXT
        self._fragments = bytearray()
        """The complete fragments of an incomplete message."""
        self._fragment_count = 0
        self._held = 0
        """The counted bytes of the incomplete message."""
        self._partial_since: float | None = None
        self._controls = LeakyBucket(CONTROL_FRAMES_PER_S, CONTROL_FRAMES_AT_ONCE)
        self._is_alive = True
        """Whether something was received since the last ping."""
        self._ping_timer, self._stall_timer, self._end_timer = (Timer(self._loop) for _ in range(3))
        self._ping_timer.start(terms.ping_s, self._ping)

    async def receive(self) -> Message | None:
        """Returns the next message; None after the end, or after :meth:`stop_receiving`."""
        while not (self._messages or self._is_stopped or self.reason is not None):
            self._arrived.clear()
            await self._arrived.wait()
        if self._is_stopped or self.reason is not None:
            return None
        message = self._messages.popleft()
        self._ahead_bytes -= len(message.data)
        if self._connection.flow.read_paused:
            self._limit_reading()
        return message

    def stop_receiving(self) -> None:
        self._is_stopped = True
        self._arrived.set()

    async def send(self, texts: Sequence[bytes]) -> None:
        """Sends text messages as soon as the client has read the earlier ones. Raises the error of the end."""
        while self._connection.flow.write_paused and self.reason is None:
            await self._connection.flow.drain()
        if self.reason is not None:
            raise cause_of(self.reason)
        if not self._transport.is_closing() and not self._connection.is_ending:
            self._transport.write(b"".join([_text_frame(text) for text in texts]))

    def close(self, reason: Reason) -> None:
        """Sends a close frame after everything sent before. A no-op after the end."""
        if self.reason is None:
            self._protocol.send_close(reason.code, reason)
            self._write()
            self._set_closed(reason)
            self._end_timer.start(CLOSE_S, partial(self._end, lingers=False))

    async def ended(self) -> None:
        """Waits until the connection has ended."""
        await self._ended.wait()

    def get_buffer(self, _size_hint: int) -> memoryview:
        is_large_frame = len(self._protocol.reader.buffer) >= FRAMES_BYTES
        return self._room if is_large_frame else self._room[:FRAMES_BYTES]

    def buffer_updated(self, size: int) -> None:
        data = bytes(self._room[:size])
        if self._connection.is_ending:
            self._connection.drop(data)
            return
        self._is_alive = True
        self._protocol.receive_data(data)
        for frame in self._protocol.events_received():
            if self.reason is None and isinstance(frame, Frame):
                self._take(frame)
        self._write()
        if self.reason is None and self._protocol.state is not OPEN:
            sent, is_of_client = self._protocol.close_sent, self._protocol.close_rcvd_then_sent
            self._set_closed(CloseReason.CLIENT if is_of_client or sent is None else _REASON_OF_LIBRARY[sent.code])
        partial = len(self._protocol.reader.buffer) + len(self._fragments)
        if not partial:
            self._partial_since = None
        elif self._partial_since is None:
            self._partial_since = self._loop.time()
        self._count(partial)
        self._limit_reading()

    def _take(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.PING, Opcode.PONG):
            if self._controls.turn(self._loop.time()) > self._loop.time():
                self._fail(CloseReason.TOO_MANY_FRAMES)
            return
        if frame.opcode is Opcode.CLOSE:
            return
        if frame.opcode is not Opcode.CONT:
            self._opcode = frame.opcode
        self._fragment_count += 1
        if not frame.fin:
            self._fragments += frame.data
            if self._fragment_count > MAX_FRAGMENTS:
                self._fail(CloseReason.TOO_MANY_FRAMES)
            return
        data = b"".join((self._fragments, frame.data)) if self._fragments else bytes(frame.data)
        self._fragments, self._fragment_count = bytearray(), 0
        is_text = self._opcode is Opcode.TEXT
        try:
            if is_text:
                data.decode()
        except UnicodeDecodeError:
            self._fail(CloseReason.INVALID_TEXT)
            return
        size, self._partial_since = len(data), None
        if self._count(size):
            self._held = 0  # the message gives them back
            self._idle.pop(self, None)
            self._unanswered += 1
            self._messages.append(Message(data, is_text, lambda: self._release(size)))
            self._ahead_bytes += size
            self._arrived.set()

    def _release(self, size: int) -> None:
        self._terms.release(size)
        self._unanswered -= 1
        if not self._unanswered and self.reason is None:
            self._idle[self] = self._loop.time()

    def close_if_idle(self) -> bool:
        """Makes room for another connection. The client may connect again. Returns False if it has closed."""
        if self.reason is not None or self._transport.is_closing():
            return False
        self._connection.connections.discard(self._connection)
        self._fail(CloseReason.IDLE)
        self._transport.close()  # after the close frame
        return True

    def _count(self, size: int) -> bool:
        """Counts ``size`` bytes for the incomplete message. Ends the WebSocket if there is no memory for them."""
        try:
            if size > self._held:
                self._terms.hold(size - self._held)
            elif size < self._held:
                self._terms.release(self._held - size)
        except TooManyRequests:
            self._fail(CloseReason.TOO_MANY_REQUESTS)
            return False
        self._held = size
        return True

    def _limit_reading(self) -> None:
        """Pauses also while the client does not read: each ping that it sends would add an answer to the unsent data.

        After the end, reads on: the client's close frame comes after everything that it has sent.
        """
        flow = self._connection.flow
        is_ahead = self._ahead_bytes > MAX_AHEAD_BYTES or len(self._messages) > MAX_AHEAD_MESSAGES
        if self.reason is None and (is_ahead or flow.write_paused):
            flow.pause_reading()
            self._connection.watch_for_disconnect()
        else:
            flow.resume_reading()

    def _write(self) -> None:
        """The library ends its data with an empty string when the connection must be closed."""
        writes = self._protocol.data_to_send()
        if not self._transport.is_closing() and not self._connection.is_ending:
            for data in writes:
                if data:
                    self._transport.write(data)
                else:
                    self._end()

    def _fail(self, reason: Reason) -> None:
        """Sends a close frame, and drops everything that the client sends."""
        if self.reason is None:
            self._protocol.fail(reason.code, reason)
            self._set_closed(reason)
            self._write()

    def _set_closed(self, reason: Reason) -> None:
        self.reason = reason
        for message in self._messages:
            message.release()
        self._messages.clear()
        self._idle.pop(self, None)
        self._ping_timer.stop()
        self._arrived.set()
        self._limit_reading()
        on_closed, self.on_closed = self.on_closed, None
        if on_closed is not None:
            on_closed()

    def _end(self, *, lingers: bool = True) -> None:
        """Closes the connection so that the client can read the close frame. Aborts if the client does not read.

        ``lingers``: unless the client has had time to read it.
        """
        self._end_timer.start(self._terms.send_s, self._abort_unsent)
        self._connection.end(lingers=lingers and self._protocol.close_rcvd is None)

    def _abort_unsent(self) -> None:
        if self._transport.get_write_buffer_size():
            self._transport.abort()

    def _ping(self) -> None:
        """Finds out whether the client is there and whether a message takes too long, unless reading is paused."""
        flow, since = self._connection.flow, self._partial_since
        if not (flow.read_paused or flow.write_paused):
            if since is not None and self._loop.time() - since > self._terms.message_s:
                self._fail(CloseReason.SLOW_MESSAGE)
                return
            if not self._is_alive:
                self._fail(CloseReason.PING_TIMEOUT)
                return
            self._is_alive = False
            self._protocol.send_ping(b"")
            self._write()
        self._ping_timer.start(self._terms.ping_s, self._ping)

    def pause_writing(self) -> None:
        self._connection.pause_writing()
        self._limit_reading()
        self._watch_progress(0.0)

    def resume_writing(self) -> None:
        self._connection.resume_writing()
        self._stall_timer.stop()
        self._limit_reading()

    def _watch_progress(self, still_s: float) -> None:
        unsent, step_s = self._transport.get_write_buffer_size(), min(self._terms.stall_s, self._terms.send_s)

        def check() -> None:
            has_progress = self._transport.get_write_buffer_size() < unsent
            now_still_s = 0.0 if has_progress else still_s + step_s
            if now_still_s >= (step_s if self.is_behind() else self._terms.send_s):
                self._fail(CloseReason.SLOW_CONSUMER)
            else:
                self._watch_progress(now_still_s)

        self._stall_timer.start(step_s, check)

    def eof_received(self) -> bool | None:
        """Without a close frame, the connection is lost."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        if self.reason is None:
            self._set_closed(CloseReason.LOST)
        self._stall_timer.stop()
        self._end_timer.stop()
        self._fragments = bytearray()
        self._protocol.reader.discard()
        self._protocol.parser.close()  # a generator of the protocol, which refers to it, as its error does
        self._protocol.parser_exc = None
        self._count(0)
        self.is_behind = bool
        self._ended.set()


def _text_frame(text: bytes) -> bytes:
    """Returns a whole text message in one frame (RFC 6455, 5.2). The library takes eight times as long."""
    size = len(text)
    if size < _TWO_BYTES:
        return b"%c%c%b" % (_WHOLE_TEXT, size, text)
    mark, form = (_TWO_BYTES, "!BBH") if size < 1 << 16 else (_EIGHT_BYTES, "!BBQ")
    return pack(form, _WHOLE_TEXT, mark, size) + text
