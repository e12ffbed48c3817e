"""The client's side of one HTTP/2 connection, without I/O: bytes in, events out.

Source: RFC 9113. The table of dynamic headers is switched off (SETTINGS_HEADER_TABLE_SIZE 0), so that a header block
means the same wherever it stands, and each distinct block is decoded once.
"""

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hpack import Decoder
from hpack.exceptions import HPACKError

from app.triton.grpc import frames
from app.triton.grpc.frames import Frame, FrameBuffer, FrameTooLarge, frame_bytes

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 8, 9, 11

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
MAX_HEADER_LIST_SIZE = 6

MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
SMALLEST_FRAME_LIMIT = 16_384
LARGEST_FRAME_LIMIT = 2**24 - 1
CONNECTION_WINDOW = 2**30
"""The connection's own window is large and kept open: the windows of the streams bound the memory."""

_SETTING = struct.Struct(">HI")
_INTEGER = struct.Struct(">I")
_GOAWAY = struct.Struct(">II")
_MAX_CACHED_BLOCKS = 64
_ENDLESS = 16
"""Header blocks of so many times the limit end the connection; smaller ones over the limit only end their stream."""

Headers = tuple[tuple[bytes, bytes], ...]


class ConnectionFailed(Exception):
    """The peer broke the protocol; the connection cannot be used any more. ``code`` is what GOAWAY tells the peer."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class HeadersReceived(NamedTuple):
    stream_id: int
    headers: Headers
    is_end: bool


class DataReceived(NamedTuple):
    """``size``: the bytes of the stream's window that it took, which :meth:`Session.acknowledge` gives back."""

    stream_id: int
    data: bytes
    size: int
    is_end: bool


class StreamReset(NamedTuple):
    """``reason`` is empty if the peer reset the stream; otherwise the session did, because of what the peer sent."""

    stream_id: int
    code: int
    reason: str = ""


class GoAway(NamedTuple):
    """The peer did not process streams above ``last_stream_id`` and accepts no new ones."""

    last_stream_id: int
    code: int


class PingAcknowledged(NamedTuple):
    content: bytes


Event = HeadersReceived | DataReceived | StreamReset | GoAway | PingAcknowledged


@dataclass(frozen=True, slots=True)
class Limits:
    """What the peer may send."""

    stream_window: int = 64 * 1024
    max_frame_bytes: int = 1024 * 1024
    max_header_bytes: int = 64 * 1024


@dataclass(slots=True)
class _Stream:
    send_window: int
    receive_window: int
    unsent: memoryview | None = None
    unacknowledged: int = 0


@dataclass(slots=True)
class _HeaderBlock:
    """A header block whose CONTINUATION frames are still to come."""

    stream_id: int
    is_end: bool
    parts: list[bytes] = field(default_factory=list)
    size: int = 0


class Session:
    """State of the connection. :meth:`take_output` gives the bytes to send after any other method."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.max_concurrent_streams = MAX_WINDOW
        """The peer's limit of open streams."""
        self.is_closing = False
        """True after GOAWAY: no new stream can be opened."""
        self._buffer = FrameBuffer(self.limits.max_frame_bytes)
        self._output = bytearray()
        self._streams: dict[int, _Stream] = {}
        self._blocked: deque[int] = deque()
        self._next_id = 1
        self._send_window = DEFAULT_WINDOW
        self._initial_send_window = DEFAULT_WINDOW
        self._max_sent_frame = SMALLEST_FRAME_LIMIT
        self._receive_window = CONNECTION_WINDOW
        self._block: _HeaderBlock | None = None
        self._decoder = Decoder(max_header_list_size=self.limits.max_header_bytes)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._decoded: dict[bytes, Headers] = {}
        self._has_settings = False
        self._start()

    def __len__(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    def take_output(self) -> bytes:
        output = bytes(self._output)
        self._output.clear()
        return output

    def receive(self, data: bytes) -> Iterator[Event]:
        """The events of the received bytes. Raises ConnectionFailed."""
        try:
            for frame in self._buffer.frames(data):
                event = self._received(frame)
                if event is not None:
                    yield event
        except FrameTooLarge as exc:
            raise ConnectionFailed(FRAME_SIZE_ERROR, str(exc)) from exc

    def open(self, header_block: bytes, body: bytes) -> int:
        """Opens a stream with its whole request; the body is sent as the peer's windows allow. Returns its id."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        stream = self._streams[stream_id] = _Stream(self._initial_send_window, self.limits.stream_window)
        self._output += frame_bytes(frames.HEADERS, frames.END_HEADERS, stream_id, header_block)
        size = len(body)
        if size <= self._max_sent_frame and size <= stream.send_window and size <= self._send_window:
            self._send_window -= size
            self._output += frame_bytes(frames.DATA, frames.END_STREAM, stream_id, body)
        else:
            stream.unsent = memoryview(body)
            self._blocked.append(stream_id)
            self._send_blocked()
        return stream_id

    @property
    def has_ids(self) -> bool:
        """False when the connection has used up its stream ids."""
        return self._next_id <= MAX_WINDOW

    def is_sent(self, stream_id: int) -> bool:
        """Whether the whole request was handed over for sending."""
        stream = self._streams.get(stream_id)
        return stream is None or stream.unsent is None

    def receive_window(self, stream_id: int) -> int:
        """The bytes that the peer may still send on a stream; 0 for a stream that has ended."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.receive_window

    def acknowledge(self, stream_id: int, size: int) -> None:
        """The reader of a stream has taken ``size`` bytes: the peer may send as many more."""
        stream = self._streams.get(stream_id)
        if stream is None or size <= 0:
            return
        stream.unacknowledged += size
        if stream.unacknowledged * 2 >= self.limits.stream_window:
            self.grant(stream_id, stream.unacknowledged)
            stream.unacknowledged = 0

    def grant(self, stream_id: int, size: int) -> None:
        """Opens the receive window of a stream by ``size`` bytes."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            size = min(size, MAX_WINDOW - stream.receive_window)
            stream.receive_window += size
            self._output += frame_bytes(frames.WINDOW_UPDATE, 0, stream_id, _INTEGER.pack(size))

    def reset(self, stream_id: int, code: int = CANCEL) -> None:
        """Ends a stream; later frames of the stream are ignored. A no-op for a stream that has ended."""
        if self._streams.pop(stream_id, None) is not None:
            self._output += frame_bytes(frames.RST_STREAM, 0, stream_id, _INTEGER.pack(code))

    def ping(self, content: bytes) -> None:
        """``content``: 8 bytes that PingAcknowledged repeats."""
        self._output += frame_bytes(frames.PING, 0, 0, content)

    def close(self, code: int = NO_ERROR) -> None:
        """Tells the peer that the connection ends."""
        self.is_closing = True
        self._output += frame_bytes(frames.GOAWAY, 0, 0, _GOAWAY.pack(0, code))

    def _start(self) -> None:
        settings = {
            HEADER_TABLE_SIZE: 0,
            ENABLE_PUSH: 0,
            INITIAL_WINDOW_SIZE: self.limits.stream_window,
            MAX_FRAME_SIZE: self.limits.max_frame_bytes,
            MAX_HEADER_LIST_SIZE: self.limits.max_header_bytes,
        }
        content = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
        self._output += frames.PREFACE + frame_bytes(frames.SETTINGS, 0, 0, content)
        self._output += frame_bytes(frames.WINDOW_UPDATE, 0, 0, _INTEGER.pack(CONNECTION_WINDOW - DEFAULT_WINDOW))

    def _received(self, frame: Frame) -> Event | None:
        if self._block is not None and (frame.kind, frame.stream_id) != (frames.CONTINUATION, self._block.stream_id):
            raise ConnectionFailed(PROTOCOL_ERROR, "a header block was interrupted")
        if not self._has_settings and frame.kind != frames.SETTINGS:
            raise ConnectionFailed(PROTOCOL_ERROR, "the first frame is not SETTINGS")
        handler = _HANDLERS.get(frame.kind)
        return handler(self, frame) if handler is not None else None

    def _on_data(self, frame: Frame) -> Event | None:
        size = len(frame.content)
        self._take_connection_window(size)
        stream = self._known_stream(frame)
        if stream is None:
            return None
        stream.receive_window -= size
        if stream.receive_window < 0:
            return self._stream_failed(frame.stream_id, FLOW_CONTROL_ERROR, "the stream's window was not respected")
        is_end = bool(frame.flags & frames.END_STREAM)
        data = _unpadded(frame)
        if is_end:
            self._ended(frame.stream_id, stream)
        return DataReceived(frame.stream_id, data, size, is_end)

    def _on_headers(self, frame: Frame) -> Event | None:
        content = _unpadded(frame)
        if frame.flags & frames.HAS_PRIORITY:
            if len(content) < 5:
                raise ConnectionFailed(FRAME_SIZE_ERROR, "HEADERS without its priority")
            content = content[5:]
        self._block = _HeaderBlock(frame.stream_id, bool(frame.flags & frames.END_STREAM))
        return self._add_to_block(frame, content)

    def _on_continuation(self, frame: Frame) -> Event | None:
        if self._block is None:
            raise ConnectionFailed(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        return self._add_to_block(frame, frame.content)

    def _add_to_block(self, frame: Frame, part: bytes) -> Event | None:
        block = self._block
        assert block is not None
        # An empty part counts too, so that endless empty CONTINUATION frames end the connection.
        block.size += len(part) + 1
        if block.size > self.limits.max_header_bytes * _ENDLESS:
            raise ConnectionFailed(ENHANCE_YOUR_CALM, "a header block has no end")
        if block.size <= self.limits.max_header_bytes:
            block.parts.append(part)
        if not frame.flags & frames.END_HEADERS:
            return None
        self._block = None
        return self._whole_block(frame, block)

    def _whole_block(self, frame: Frame, block: _HeaderBlock) -> Event | None:
        is_too_large = block.size > self.limits.max_header_bytes
        headers = () if is_too_large else self._headers_of(b"".join(block.parts))
        stream = self._known_stream(frame)
        if stream is None:
            return None
        if is_too_large:
            reason = f"metadata size exceeds the limit of {self.limits.max_header_bytes} bytes"
            return self._stream_failed(frame.stream_id, ENHANCE_YOUR_CALM, reason)
        if block.is_end:
            self._ended(frame.stream_id, stream)
        return HeadersReceived(frame.stream_id, headers, block.is_end)

    def _headers_of(self, block: bytes) -> Headers:
        headers = self._decoded.get(block)
        if headers is None:
            try:
                headers = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
            except (HPACKError, ValueError, IndexError) as exc:
                raise ConnectionFailed(COMPRESSION_ERROR, "a header block cannot be decoded") from exc
            if len(self._decoded) < _MAX_CACHED_BLOCKS:
                self._decoded[block] = headers
        return headers

    def _on_rst_stream(self, frame: Frame) -> Event | None:
        code = _integer(frame)
        if self._known_stream(frame) is None:
            return None
        del self._streams[frame.stream_id]
        return StreamReset(frame.stream_id, code)

    def _on_settings(self, frame: Frame) -> Event | None:
        if frame.stream_id or len(frame.content) % 6 or (frame.flags & frames.ACK and frame.content):
            raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed SETTINGS")
        if frame.flags & frames.ACK:
            return None
        self._has_settings = True
        for name, value in _SETTING.iter_unpack(frame.content):
            self._set(name, value)
        self._output += frame_bytes(frames.SETTINGS, frames.ACK, 0)
        self._send_blocked()
        return None

    def _set(self, name: int, value: int) -> None:
        if name == MAX_CONCURRENT_STREAMS:
            self.max_concurrent_streams = value
        elif name == MAX_FRAME_SIZE:
            if not SMALLEST_FRAME_LIMIT <= value <= LARGEST_FRAME_LIMIT:
                raise ConnectionFailed(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of range")
            self._max_sent_frame = value
        elif name == INITIAL_WINDOW_SIZE:
            self._change_initial_window(value)

    def _change_initial_window(self, value: int) -> None:
        if value > MAX_WINDOW:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE out of range")
        change, self._initial_send_window = value - self._initial_send_window, value
        for stream in self._streams.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFailed(FLOW_CONTROL_ERROR, "a stream's window is too large")

    def _on_push_promise(self, _frame: Frame) -> Event | None:
        raise ConnectionFailed(PROTOCOL_ERROR, "PUSH_PROMISE is switched off")

    def _on_ping(self, frame: Frame) -> Event | None:
        if frame.stream_id or len(frame.content) != 8:
            raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed PING")
        if frame.flags & frames.ACK:
            return PingAcknowledged(frame.content)
        self._output += frame_bytes(frames.PING, frames.ACK, 0, frame.content)
        return None

    def _on_goaway(self, frame: Frame) -> Event | None:
        if frame.stream_id or len(frame.content) < _GOAWAY.size:
            raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed GOAWAY")
        self.is_closing = True
        last_stream_id, code = _GOAWAY.unpack_from(frame.content)
        last_stream_id &= MAX_WINDOW
        for stream_id in [each for each in self._streams if each > last_stream_id]:
            del self._streams[stream_id]
        return GoAway(last_stream_id, code)

    def _on_window_update(self, frame: Frame) -> Event | None:
        size = _integer(frame) & MAX_WINDOW
        if not frame.stream_id:
            self._send_window += size
            if not size or self._send_window > MAX_WINDOW:
                raise ConnectionFailed(FLOW_CONTROL_ERROR, "malformed WINDOW_UPDATE")
        else:
            stream = self._known_stream(frame)
            if stream is None:
                return None
            stream.send_window += size
            if not size or stream.send_window > MAX_WINDOW:
                return self._stream_failed(frame.stream_id, FLOW_CONTROL_ERROR, "malformed WINDOW_UPDATE")
        self._send_blocked()
        return None

    def _known_stream(self, frame: Frame) -> _Stream | None:
        """None for a stream that has ended. Raises ConnectionFailed for one that was never opened."""
        stream = self._streams.get(frame.stream_id)
        if stream is None and (frame.stream_id % 2 == 0 or frame.stream_id >= self._next_id):
            raise ConnectionFailed(PROTOCOL_ERROR, "a frame of a stream that was never opened")
        return stream

    def _stream_failed(self, stream_id: int, code: int, reason: str) -> Event:
        self.reset(stream_id, code)
        return StreamReset(stream_id, code, reason)

    def _ended(self, stream_id: int, stream: _Stream) -> None:
        """The peer has answered. If it did not wait for the whole request, the rest is not sent."""
        if stream.unsent is not None:
            self.reset(stream_id, NO_ERROR)
        else:
            del self._streams[stream_id]

    def _take_connection_window(self, size: int) -> None:
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "the connection's window was not respected")
        if self._receive_window * 2 < CONNECTION_WINDOW:
            grown = CONNECTION_WINDOW - self._receive_window
            self._receive_window = CONNECTION_WINDOW
            self._output += frame_bytes(frames.WINDOW_UPDATE, 0, 0, _INTEGER.pack(grown))

    def _send_blocked(self) -> None:
        """Sends what the windows allow, one frame of each waiting stream in turn."""
        is_sending = True
        while is_sending:
            is_sending = False
            for _ in range(len(self._blocked)):
                stream_id = self._blocked.popleft()
                stream = self._streams.get(stream_id)
                if stream is None or stream.unsent is None:
                    continue
                is_sending |= self._send_frame(stream_id, stream, stream.unsent)
                if stream.unsent is not None:
                    self._blocked.append(stream_id)

    def _send_frame(self, stream_id: int, stream: _Stream, unsent: memoryview) -> bool:
        """Sends the next part of a body. False if the windows are closed."""
        size = min(len(unsent), self._max_sent_frame, stream.send_window, self._send_window)
        is_end = size == len(unsent)
        if size <= 0 and not is_end:
            return False
        stream.send_window -= size
        self._send_window -= size
        flags = frames.END_STREAM if is_end else 0
        self._output += frame_bytes(frames.DATA, flags, stream_id, bytes(unsent[:size]))
        stream.unsent = None if is_end else unsent[size:]
        return True


_HANDLERS = {
    frames.DATA: Session._on_data,
    frames.HEADERS: Session._on_headers,
    frames.RST_STREAM: Session._on_rst_stream,
    frames.SETTINGS: Session._on_settings,
    frames.PUSH_PROMISE: Session._on_push_promise,
    frames.PING: Session._on_ping,
    frames.GOAWAY: Session._on_goaway,
    frames.WINDOW_UPDATE: Session._on_window_update,
    frames.CONTINUATION: Session._on_continuation,
}
"""Frames of other kinds, PRIORITY among them, are ignored (RFC 9113, 5.5)."""


def _unpadded(frame: Frame) -> bytes:
    if not frame.flags & frames.PADDED:
        return frame.content
    padding = frame.content[0] if frame.content else 0
    end = len(frame.content) - padding
    if end < 1:
        raise ConnectionFailed(PROTOCOL_ERROR, "a frame is all padding")
    return frame.content[1:end]


def _integer(frame: Frame) -> int:
    if len(frame.content) != _INTEGER.size:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "a frame of the wrong size")
    return int(_INTEGER.unpack(frame.content)[0])
