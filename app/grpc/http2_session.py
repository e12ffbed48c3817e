"""The client's side of one HTTP/2 connection, without I/O: bytes in, calls of its streams out. Source: RFC 9113."""

import struct
from collections import deque
from collections.abc import Iterator

from app.grpc import frames
from app.grpc.frames import HEADER_BYTES, MAX_WINDOW, ConnectionFailed, Frame, HeaderBlocks, Headers, frame_bytes

SMALLEST_FRAME_LIMIT = 16_384
LARGEST_FRAME_LIMIT = 2**24 - 1
MOST_COPIED = 64 * 1024
"""A body up to this size is copied into its frame, if one frame can have it."""


class Http2Stream:
    """Base class of a stream: what it has sent and received, and what the session calls for each frame of the peer."""

    __slots__ = ("receive_window", "send_window", "stream_id", "unacknowledged", "unsent")

    stream_id: int
    send_window: int
    receive_window: int
    unacknowledged: int
    """Read bytes that were not returned to the receive window. Negative: bytes that were granted in advance."""
    unsent: deque[memoryview] | None

    def received_headers(self, headers: Headers, is_end: bool) -> None:
        raise NotImplementedError

    def received_data(self, data: bytes, size: int, is_end: bool) -> None:
        """``size``: the used bytes of the receive window, which :meth:`Session.acknowledge` returns."""
        raise NotImplementedError

    def was_reset(self, code: int | None, reason: str) -> None:
        """The stream has ended, with its connection if there is no code.

        ``reason``: empty if the peer reset it, otherwise why the session did.
        """
        raise NotImplementedError


class FrameBuffer:
    """Assembles frames from received bytes, which may be split anywhere."""

    def __init__(self, max_content_bytes: int) -> None:
        self._max_content_bytes = max_content_bytes
        self._rest = b""
        """The start of a frame's header."""
        self._cut: Frame | None = None
        """An incomplete frame. The pieces of its content are joined once."""
        self._pieces: list[bytes] = []
        self._missing = 0

    def frames(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that ``data`` completes. Raises ConnectionFailed."""
        start = 0
        if self._cut is not None:
            start = self._missing
            self._pieces.append(data[:start])
            if len(data) < start:
                self._missing -= len(data)
                return
            frame, self._cut = self._cut, None
            frame.content = b"".join(self._pieces)
            yield frame
        elif self._rest:
            data = self._rest + data
        end, limit, unpack = len(data), self._max_content_bytes, frames.HEADER.unpack_from
        while end - start >= HEADER_BYTES:
            size_and_kind, flags, stream_id = unpack(data, start)
            size = size_and_kind >> 8
            if size > limit:
                raise ConnectionFailed(frames.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            start += HEADER_BYTES
            after = start + size
            frame = Frame(size_and_kind & 0xFF, flags, stream_id & MAX_WINDOW, data[start:after])
            if after > end:
                self._cut, self._pieces, self._missing = frame, [frame.content], after - end
                self._rest = b""
                return
            start = after
            yield frame
        self._rest = data[start:]


_SETTING = struct.Struct(">HI")
_LOW_WINDOW = frames.CONNECTION_WINDOW // 2


class Session:
    """The state of a connection. After a call of any method, ``output`` has the bytes to send."""

    def __init__(self, stream_window: int = frames.STREAM_WINDOW) -> None:
        self.stream_window = stream_window
        self.max_concurrent_streams = MAX_WINDOW
        """The peer's limit on open streams."""
        self.is_closing = False
        """No new stream can be opened: after GOAWAY, after the last stream id, or when the connection is lost."""
        self.streams: dict[int, Http2Stream] = {}
        """The streams that have not ended."""
        self._buffer = FrameBuffer(frames.MAX_FRAME_BYTES)
        self._blocks = HeaderBlocks()
        self._next_id = 1
        self._has_settings = False
        self._receive_window = frames.CONNECTION_WINDOW
        self._send_window = self._initial_window = frames.DEFAULT_WINDOW
        """The send window of the connection, and the initial window of a new stream."""
        self._max_frame_bytes = self._most_copied = SMALLEST_FRAME_LIMIT
        self._blocked: deque[Http2Stream] = deque()
        """Streams whose body exceeds the windows and waits."""
        settings = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: self.stream_window,
            frames.MAX_FRAME_SIZE: frames.MAX_FRAME_BYTES,
            frames.MAX_HEADER_LIST_SIZE: frames.MAX_HEADER_BYTES,
        }
        own = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
        self.output: list[bytes | memoryview] = [
            frames.PREFACE,
            frame_bytes(frames.SETTINGS, 0, 0, own),
            frames.integer_frame(frames.WINDOW_UPDATE, 0, frames.CONNECTION_WINDOW - frames.DEFAULT_WINDOW),
        ]

    def receive(self, data: bytes) -> None:
        """Parses received bytes and passes them to their streams. Raises ConnectionFailed."""
        for frame in self._buffer.frames(data):
            kind, stream_id, block_id = frame.kind, frame.stream_id, self._blocks.stream_id
            if block_id and (kind != frames.CONTINUATION or stream_id != block_id):
                raise ConnectionFailed(frames.PROTOCOL_ERROR, "a header block was interrupted")
            if not self._has_settings and kind != frames.SETTINGS:
                raise ConnectionFailed(frames.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            handler = _HANDLERS.get(kind)
            if handler is None:
                if kind == frames.PUSH_PROMISE:
                    raise ConnectionFailed(frames.PROTOCOL_ERROR, "PUSH_PROMISE is switched off")
                continue
            stream = self.streams.get(stream_id)
            is_unknown = stream is None and (stream_id % 2 == 0 or stream_id >= self._next_id)
            if is_unknown and (stream_id or kind in _OF_STREAMS):
                raise ConnectionFailed(frames.PROTOCOL_ERROR, "a frame of a stream that was never opened")
            handler(self, frame, stream)

    def open(self, stream: Http2Stream, header_block: bytes, body: bytes, prefix: bytes = b"") -> None:
        """Opens a stream with its whole request. The body is sent within the peer's windows.

        ``prefix``: bytes to send before the body. A large body is not copied.
        """
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self.is_closing |= self._next_id > MAX_WINDOW
        self.streams[stream_id] = stream
        stream.stream_id, stream.unsent, stream.unacknowledged = stream_id, None, 0
        stream.send_window, stream.receive_window = self._initial_window, self.stream_window
        limit, end = self._max_frame_bytes, len(header_block)
        if end <= limit:
            self.output.append(frame_bytes(frames.HEADERS, frames.END_HEADERS, stream_id, header_block))
        else:
            for start in range(0, end, limit):
                kind = frames.CONTINUATION if start else frames.HEADERS
                flags = frames.END_HEADERS if start + limit >= end else 0
                self.output.append(frame_bytes(kind, flags, stream_id, header_block[start : start + limit]))
        size = len(prefix) + len(body)
        if size <= self._most_copied and size <= stream.send_window and size <= self._send_window:
            self._send_window -= size
            self.output.append(frame_bytes(frames.DATA, frames.END_STREAM, stream_id, prefix + body))
        else:
            stream.unsent = deque(memoryview(part) for part in (prefix, body) if part)
            self._blocked.append(stream)
            self._send_blocked()

    def _send_blocked(self) -> None:
        """Sends waiting bodies within the windows, one frame of each stream in turn. Source: RFC 9113, 5.2."""
        is_sending = True
        while is_sending and self._send_window:
            is_sending = False
            for _ in range(len(self._blocked)):
                stream = self._blocked.popleft()
                if (unsent := stream.unsent) is None:
                    continue  # the stream has ended
                size = min(len(unsent[0]), self._max_frame_bytes, stream.send_window, self._send_window)
                if size > 0:
                    is_sending = True
                    stream.send_window -= size
                    self._send_window -= size
                    part = unsent.popleft()
                    if size < len(part):
                        unsent.appendleft(part[size:])
                    flags = 0 if unsent else frames.END_STREAM
                    self.output += (frames.HEADER.pack(size << 8 | frames.DATA, flags, stream.stream_id), part[:size])
                    if not unsent:
                        stream.unsent = None
                        continue
                self._blocked.append(stream)

    @property
    def has_room(self) -> bool:
        """Whether a stream can be opened now, within the peer's limit of open streams."""
        return len(self.streams) < self.max_concurrent_streams and not self.is_closing

    def acknowledge(self, stream: Http2Stream, size: int) -> None:
        """Returns ``size`` bytes to the receive window after the reader has read them. A no-op after the end."""
        stream.unacknowledged += size
        if stream.unacknowledged * 2 >= self.stream_window:
            self._grant(stream, stream.unacknowledged)

    def await_bytes(self, stream: Http2Stream, size: int) -> bool:
        """Opens the receive window for the next ``size`` bytes. Bytes above the window are granted in advance.

        Returns:
            Whether the window was smaller.
        """
        return stream.receive_window < size and self._grant(stream, size - stream.receive_window)

    def _grant(self, stream: Http2Stream, size: int) -> bool:
        if stream.stream_id not in self.streams:
            return False
        stream.receive_window += size
        stream.unacknowledged -= size
        self.output.append(frames.integer_frame(frames.WINDOW_UPDATE, stream.stream_id, size))
        return True

    def reset(self, stream: Http2Stream, code: int = frames.CANCEL) -> bool:
        """Ends a stream; later frames of the stream are ignored. Returns False for a stream that has ended."""
        if self.streams.pop(stream.stream_id, None) is None:
            return False
        stream.unsent = None
        self.output.append(frames.integer_frame(frames.RST_STREAM, stream.stream_id, code))
        return True

    def ping(self, content: bytes) -> None:
        """``content``: 8 bytes that the answer of the peer repeats."""
        self.output.append(frame_bytes(frames.PING, 0, 0, content))

    def close(self, code: int = frames.NO_ERROR) -> None:
        """Tells the peer that the connection ends."""
        self.is_closing = True
        self.output.append(frame_bytes(frames.GOAWAY, 0, 0, struct.pack(">II", 0, code)))

    def _on_data(self, frame: Frame, stream: Http2Stream | None) -> None:
        size = len(frame.content)
        self._receive_window -= size
        if self._receive_window < _LOW_WINDOW:
            if self._receive_window < 0:
                raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, "the connection's window was not respected")
            grown, self._receive_window = frames.CONNECTION_WINDOW - self._receive_window, frames.CONNECTION_WINDOW
            self.output.append(frames.integer_frame(frames.WINDOW_UPDATE, 0, grown))
        if stream is None:
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self._fail(stream, frames.FLOW_CONTROL_ERROR, "the stream's window was not respected")
            return
        data = frames.unpadded(frame) if frame.flags & frames.PADDED else frame.content
        is_end = bool(frame.flags & frames.END_STREAM)
        if is_end:
            self._end(stream)
        stream.received_data(data, size, is_end)

    def _on_headers(self, frame: Frame, stream: Http2Stream | None) -> None:
        """HEADERS or CONTINUATION."""
        block = self._blocks.take(frame)
        if stream is None or block is None:
            return
        headers, is_end = block
        if headers is None:
            reason = f"metadata size exceeds the limit of {frames.MAX_HEADER_BYTES} bytes"
            self._fail(stream, frames.ENHANCE_YOUR_CALM, reason)
            return
        if is_end:
            self._end(stream)
        stream.received_headers(headers, is_end)

    def _on_rst_stream(self, frame: Frame, stream: Http2Stream | None) -> None:
        if len(frame.content) != 4:
            raise ConnectionFailed(frames.FRAME_SIZE_ERROR, "malformed RST_STREAM")
        if stream is not None:
            del self.streams[frame.stream_id]
            stream.unsent = None
            stream.was_reset(int.from_bytes(frame.content, "big"), "")

    def _on_settings(self, frame: Frame, _stream: Http2Stream | None) -> None:
        is_ack = bool(frame.flags & frames.ACK)
        if frame.stream_id or len(frame.content) % _SETTING.size or (is_ack and frame.content):
            raise ConnectionFailed(frames.FRAME_SIZE_ERROR, "malformed SETTINGS")
        if is_ack:
            return
        self._has_settings = True
        for name, value in _SETTING.iter_unpack(frame.content):
            if name == frames.MAX_CONCURRENT_STREAMS:
                self.max_concurrent_streams = value
            elif name == frames.MAX_FRAME_SIZE:
                if not SMALLEST_FRAME_LIMIT <= value <= LARGEST_FRAME_LIMIT:
                    raise ConnectionFailed(frames.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of range")
                self._max_frame_bytes, self._most_copied = value, min(value, MOST_COPIED)
            elif name == frames.INITIAL_WINDOW_SIZE:
                change, self._initial_window = value - self._initial_window, value
                for stream in self.streams.values():
                    stream.send_window += change
                if max([value, *(stream.send_window for stream in self.streams.values())]) > MAX_WINDOW:
                    raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE out of range")
        self.output.append(frame_bytes(frames.SETTINGS, frames.ACK, 0))
        self._send_blocked()

    def _on_ping(self, frame: Frame, _stream: Http2Stream | None) -> None:
        if frame.stream_id or len(frame.content) != 8:
            raise ConnectionFailed(frames.FRAME_SIZE_ERROR, "malformed PING")
        if not frame.flags & frames.ACK:
            self.output.append(frame_bytes(frames.PING, frames.ACK, 0, frame.content))

    def _on_goaway(self, frame: Frame, stream: Http2Stream | None) -> None:
        """The peer did not process streams above the given one, as if it had refused each of them."""
        if frame.stream_id or len(frame.content) < 8:
            raise ConnectionFailed(frames.FRAME_SIZE_ERROR, "malformed GOAWAY")
        (last_stream_id,) = struct.unpack_from(">I", frame.content)
        self.is_closing = True
        for stream_id in [each for each in self.streams if each > last_stream_id & MAX_WINDOW]:
            if (stream := self.streams.pop(stream_id, None)) is not None:
                stream.unsent = None
                stream.was_reset(frames.REFUSED_STREAM, "the server is going away")

    def _on_window_update(self, frame: Frame, stream: Http2Stream | None) -> None:
        if len(frame.content) != 4:
            raise ConnectionFailed(frames.FRAME_SIZE_ERROR, "malformed WINDOW_UPDATE")
        size = int.from_bytes(frame.content, "big") & MAX_WINDOW
        if not frame.stream_id:
            self._send_window += size
            if not size or self._send_window > MAX_WINDOW:
                raise ConnectionFailed(frames.FLOW_CONTROL_ERROR, "malformed WINDOW_UPDATE")
        elif stream is not None:
            stream.send_window += size
            if not size or stream.send_window > MAX_WINDOW:
                self._fail(stream, frames.FLOW_CONTROL_ERROR, "malformed WINDOW_UPDATE")
        if self._blocked:
            self._send_blocked()

    def _fail(self, stream: Http2Stream, code: int, reason: str) -> None:
        self.reset(stream, code)
        stream.was_reset(code, reason)

    def _end(self, stream: Http2Stream) -> None:
        """Removes a stream that the peer has answered. An unsent rest of the request is not sent."""
        if stream.unsent is not None:
            self.reset(stream, frames.NO_ERROR)
        else:
            del self.streams[stream.stream_id]


_OF_STREAMS = {frames.DATA, frames.HEADERS, frames.RST_STREAM, frames.CONTINUATION}
_HANDLERS = {
    frames.DATA: Session._on_data,
    frames.HEADERS: Session._on_headers,
    frames.RST_STREAM: Session._on_rst_stream,
    frames.SETTINGS: Session._on_settings,
    frames.PING: Session._on_ping,
    frames.GOAWAY: Session._on_goaway,
    frames.WINDOW_UPDATE: Session._on_window_update,
    frames.CONTINUATION: Session._on_headers,
}
"""Frames of other types, including PRIORITY, are ignored (RFC 9113, 5.5)."""
