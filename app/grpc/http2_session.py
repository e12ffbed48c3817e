"""The client's side of one HTTP/2 connection, without I/O: bytes in, events out. Source: RFC 9113."""

import struct
from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from app.grpc import frames
from app.grpc.frames import (
    CANCEL,
    CONNECTION_WINDOW,
    DEFAULT_WINDOW,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    MAX_WINDOW,
    NO_ERROR,
    PROTOCOL_ERROR,
    ConnectionFailed,
    DataReceived,
    Event,
    Frame,
    FrameBuffer,
    GoAway,
    HeadersReceived,
    PeerLimits,
    StreamReset,
    frame_bytes,
    frame_header,
)
from app.grpc.header_blocks import HeaderBlocks

SMALLEST_FRAME_LIMIT = 16_384
LARGEST_FRAME_LIMIT = 2**24 - 1
MOST_COPIED = 64 * 1024
"""A body up to this size is copied into its frame, if one frame can have it."""


class Http2Stream(Struct, eq=False):
    send_window: int
    receive_window: int
    unsent: deque[memoryview] | None = None
    unacknowledged: int = 0
    """Read bytes that were not returned to the receive window. Negative: bytes that were granted in advance."""


_SETTING = struct.Struct(">HI")
_LOW_WINDOW = CONNECTION_WINDOW // 2


class Session:
    """The state of a connection. After each call of another method, :meth:`take_output` returns the bytes to send."""

    def __init__(self, limits: PeerLimits | None = None) -> None:
        self.limits = limits or PeerLimits()
        self.max_concurrent_streams = MAX_WINDOW
        """The peer's limit on open streams."""
        self.is_closing = False
        """True after GOAWAY, or when the connection is lost: no new stream can be opened."""
        self._buffer = FrameBuffer(self.limits.max_frame_bytes)
        self._blocks = HeaderBlocks(self.limits.max_header_bytes)
        self._streams: dict[int, Http2Stream] = {}
        self._next_id = 1
        self._has_settings = False
        self._receive_window = CONNECTION_WINDOW
        self._send_window = self._initial_window = DEFAULT_WINDOW
        """Of the connection, and of a new stream."""
        self._max_frame_bytes = self._most_copied = SMALLEST_FRAME_LIMIT
        self._blocked: deque[int] = deque()
        """Streams whose body exceeds the windows and waits."""
        settings = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: self.limits.stream_window,
            frames.MAX_FRAME_SIZE: self.limits.max_frame_bytes,
            frames.MAX_HEADER_LIST_SIZE: self.limits.max_header_bytes,
        }
        own = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
        self._output: list[bytes | memoryview] = [
            frames.PREFACE,
            frame_bytes(frames.SETTINGS, 0, 0, own),
            frames.integer_frame(frames.WINDOW_UPDATE, 0, CONNECTION_WINDOW - DEFAULT_WINDOW),
        ]

    @property
    def has_output(self) -> bool:
        return bool(self._output)

    def take_output(self) -> list[bytes | memoryview]:
        output = self._output.copy()
        self._output.clear()
        return output

    def receive(self, data: bytes) -> Iterator[Event]:
        """Parses received bytes and yields events. Raises ConnectionFailed."""
        for frame in self._buffer.frames(data):
            block = self._blocks.unfinished
            if block is not None and (frame.kind, frame.stream_id) != (frames.CONTINUATION, block.stream_id):
                raise ConnectionFailed(PROTOCOL_ERROR, "a header block was interrupted")
            if not self._has_settings and frame.kind != frames.SETTINGS:
                raise ConnectionFailed(PROTOCOL_ERROR, "the first frame is not SETTINGS")
            handler = _HANDLERS.get(frame.kind)
            event = handler(self, frame) if handler is not None else None
            if event is not None:
                yield event

    def open(self, header_block: bytes, body: bytes, prefix: bytes = b"") -> int:
        """Opens a stream with its whole request, and returns the stream id. The body is sent within the peer's windows.

        ``prefix``: bytes to send before the body. A large body is not copied.
        """
        stream_id, self._next_id = self._next_id, self._next_id + 2
        stream = self._streams[stream_id] = Http2Stream(self._initial_window, self.limits.stream_window)
        limit, end = self._max_frame_bytes, len(header_block)
        if end <= limit:
            self._output.append(frame_bytes(frames.HEADERS, frames.END_HEADERS, stream_id, header_block))
        else:
            for start in range(0, end, limit):
                kind = frames.CONTINUATION if start else frames.HEADERS
                flags = frames.END_HEADERS if start + limit >= end else 0
                self._output.append(frame_bytes(kind, flags, stream_id, header_block[start : start + limit]))
        size = len(prefix) + len(body)
        if size <= self._most_copied and size <= stream.send_window and size <= self._send_window:
            self._send_window -= size
            self._output.append(frame_bytes(frames.DATA, frames.END_STREAM, stream_id, prefix + body))
        else:
            stream.unsent = deque(memoryview(part) for part in (prefix, body) if part)
            self._blocked.append(stream_id)
            self._send_blocked()
        return stream_id

    def _send_blocked(self) -> None:
        """Sends waiting bodies within the windows, one frame of each stream in turn. Source: RFC 9113, 5.2."""
        is_sending = True
        while is_sending and self._send_window:
            is_sending = False
            for _ in range(len(self._blocked)):
                stream_id = self._blocked.popleft()
                stream = self._streams.get(stream_id)
                if stream is None or (unsent := stream.unsent) is None:
                    continue
                size = min(len(unsent[0]), self._max_frame_bytes, stream.send_window, self._send_window)
                if size > 0:
                    is_sending = True
                    stream.send_window -= size
                    self._send_window -= size
                    part = unsent.popleft()
                    if size < len(part):
                        unsent.appendleft(part[size:])
                    flags = 0 if unsent else frames.END_STREAM
                    self._output += (frame_header(frames.DATA, flags, stream_id, size), part[:size])
                    if not unsent:
                        stream.unsent = None
                        continue
                self._blocked.append(stream_id)

    @property
    def accepts_streams(self) -> bool:
        """Returns False after GOAWAY, or when the stream ids of the connection are used up."""
        return not self.is_closing and self._next_id <= MAX_WINDOW

    @property
    def has_room(self) -> bool:
        """Whether a stream can be opened now, within the peer's limit of open streams."""
        return len(self._streams) < self.max_concurrent_streams and self.accepts_streams

    def receive_window(self, stream_id: int) -> int:
        """Returns the bytes that the peer may still send on a stream; 0 for a stream that has ended."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.receive_window

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Returns ``size`` bytes to the receive window after the reader has read them."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.unacknowledged += size
        if stream.unacknowledged * 2 >= self.limits.stream_window:
            self._grant(stream_id, stream, stream.unacknowledged)

    def await_bytes(self, stream_id: int, size: int) -> bool:
        """Opens the receive window for the next ``size`` bytes. Bytes above the window are granted in advance.

        Returns:
            Whether the window was smaller.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.receive_window >= size:
            return False
        self._grant(stream_id, stream, size - stream.receive_window)
        return True

    def _grant(self, stream_id: int, stream: Http2Stream, size: int) -> None:
        stream.receive_window += size
        stream.unacknowledged -= size
        self._output.append(frames.integer_frame(frames.WINDOW_UPDATE, stream_id, size))

    def reset(self, stream_id: int, code: int = CANCEL) -> None:
        """Ends a stream; later frames of the stream are ignored. A no-op for a stream that has ended."""
        if self._streams.pop(stream_id, None) is not None:
            self._output.append(frames.integer_frame(frames.RST_STREAM, stream_id, code))

    def ping(self, content: bytes) -> None:
        """``content``: 8 bytes that the answer of the peer repeats."""
        self._output.append(frame_bytes(frames.PING, 0, 0, content))

    def close(self, code: int = NO_ERROR) -> None:
        """Tells the peer that the connection ends."""
        self.is_closing = True
        self._output.append(frame_bytes(frames.GOAWAY, 0, 0, struct.pack(">II", 0, code)))

    def _on_data(self, frame: Frame) -> Event | None:
        size = len(frame.content)
        self._receive_window -= size
        if self._receive_window < _LOW_WINDOW:
            if self._receive_window < 0:
                raise ConnectionFailed(FLOW_CONTROL_ERROR, "the connection's window was not respected")
            grown, self._receive_window = CONNECTION_WINDOW - self._receive_window, CONNECTION_WINDOW
            self._output.append(frames.integer_frame(frames.WINDOW_UPDATE, 0, grown))
        stream = self._known_stream(frame)
        if stream is None:
            return None
        stream.receive_window -= size
        if stream.receive_window < 0:
            return self._stream_failed(frame.stream_id, FLOW_CONTROL_ERROR, "the stream's window was not respected")
        is_end = bool(frame.flags & frames.END_STREAM)
        data = frames.unpadded(frame)
        if is_end:
            self._ended(frame.stream_id, stream)
        return DataReceived(frame.stream_id, data, size, is_end)

    def _on_headers(self, frame: Frame) -> Event | None:
        """HEADERS or CONTINUATION."""
        headers, is_end = self._blocks.repeated(frame), bool(frame.flags & frames.END_STREAM)
        if headers is None or frame.kind == frames.CONTINUATION:
            block = self._blocks.add(frame)
            if block is None:
                return None
            headers, is_end = self._blocks.headers_of(block), block.is_end
        stream = self._known_stream(frame)
        if stream is None:
            return None
        if headers is None:
            reason = f"metadata size exceeds the limit of {self.limits.max_header_bytes} bytes"
            return self._stream_failed(frame.stream_id, ENHANCE_YOUR_CALM, reason)
        if is_end:
            self._ended(frame.stream_id, stream)
        return HeadersReceived(frame.stream_id, headers, is_end)

    def _on_rst_stream(self, frame: Frame) -> Event | None:
        code = frames.integer_of(frame)
        if self._known_stream(frame) is None:
            return None
        del self._streams[frame.stream_id]
        return StreamReset(frame.stream_id, code)

    def _on_settings(self, frame: Frame) -> Event | None:
        is_ack = bool(frame.flags & frames.ACK)
        if frame.stream_id or len(frame.content) % _SETTING.size or (is_ack and frame.content):
            raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed SETTINGS")
        if is_ack:
            return None
        self._has_settings = True
        for name, value in _SETTING.iter_unpack(frame.content):
            if name == frames.MAX_CONCURRENT_STREAMS:
                self.max_concurrent_streams = value
            elif name == frames.MAX_FRAME_SIZE:
                if not SMALLEST_FRAME_LIMIT <= value <= LARGEST_FRAME_LIMIT:
                    raise ConnectionFailed(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of range")
                self._max_frame_bytes, self._most_copied = value, min(value, MOST_COPIED)
            elif name == frames.INITIAL_WINDOW_SIZE:
                change, self._initial_window = value - self._initial_window, value
                for stream in self._streams.values():
                    stream.send_window += change
                if max([value, *(stream.send_window for stream in self._streams.values())]) > MAX_WINDOW:
                    raise ConnectionFailed(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE out of range")
        self._output.append(frame_bytes(frames.SETTINGS, frames.ACK, 0))
        self._send_blocked()
        return None

    def _on_push_promise(self, _frame: Frame) -> Event | None:
        raise ConnectionFailed(PROTOCOL_ERROR, "PUSH_PROMISE is switched off")

    def _on_ping(self, frame: Frame) -> Event | None:
        if frame.stream_id or len(frame.content) != 8:
            raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed PING")
        if not frame.flags & frames.ACK:
            self._output.append(frame_bytes(frames.PING, frames.ACK, 0, frame.content))
        return None

    def _on_goaway(self, frame: Frame) -> Event | None:
        if frame.stream_id or len(frame.content) < 8:
            raise ConnectionFailed(FRAME_SIZE_ERROR, "malformed GOAWAY")
        last_stream_id, code = struct.unpack_from(">II", frame.content)
        event = GoAway(last_stream_id & MAX_WINDOW, code)
        self.is_closing = True
        for stream_id in [each for each in self._streams if each > event.last_stream_id]:
            del self._streams[stream_id]
        return event

    def _on_window_update(self, frame: Frame) -> Event | None:
        size = frames.integer_of(frame) & MAX_WINDOW
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

    def _known_stream(self, frame: Frame) -> Http2Stream | None:
        """Returns None for a stream that has ended. Raises ConnectionFailed for a stream that was never opened."""
        stream = self._streams.get(frame.stream_id)
        if stream is None and (frame.stream_id % 2 == 0 or frame.stream_id >= self._next_id):
            raise ConnectionFailed(PROTOCOL_ERROR, "a frame of a stream that was never opened")
        return stream

    def _stream_failed(self, stream_id: int, code: int, reason: str) -> Event:
        self.reset(stream_id, code)
        return StreamReset(stream_id, code, reason)

    def _ended(self, stream_id: int, stream: Http2Stream) -> None:
        """Removes a stream that the peer has answered. An unsent rest of the request is not sent."""
        if stream.unsent is not None:
            self.reset(stream_id, NO_ERROR)
        else:
            del self._streams[stream_id]


_HANDLERS = {
    frames.DATA: Session._on_data,
    frames.HEADERS: Session._on_headers,
    frames.RST_STREAM: Session._on_rst_stream,
    frames.SETTINGS: Session._on_settings,
    frames.PUSH_PROMISE: Session._on_push_promise,
    frames.PING: Session._on_ping,
    frames.GOAWAY: Session._on_goaway,
    frames.WINDOW_UPDATE: Session._on_window_update,
    frames.CONTINUATION: Session._on_headers,
}
"""Frames of other types, including PRIORITY, are ignored (RFC 9113, 5.5)."""
