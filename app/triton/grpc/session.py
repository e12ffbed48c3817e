"""The client's side of one HTTP/2 connection, without I/O: bytes in, events out. Source: RFC 9113."""

from collections.abc import Iterator

from app.triton.grpc import contents, frames
from app.triton.grpc.contents import CONNECTION_WINDOW, MAX_WINDOW, Limits
from app.triton.grpc.events import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    NO_ERROR,
    PROTOCOL_ERROR,
    ConnectionFailed,
    DataReceived,
    Event,
    Headers,
    HeadersReceived,
    PingAcknowledged,
    StreamReset,
)
from app.triton.grpc.frames import Frame, FrameBuffer, FrameTooLarge, frame_bytes
from app.triton.grpc.header_blocks import HeaderBlocks
from app.triton.grpc.sending import Sender, Stream

_LOW_WINDOW = CONNECTION_WINDOW // 2


class Session:
    """The state of a connection. After each call of another method, :meth:`take_output` returns the bytes to send."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.max_concurrent_streams = MAX_WINDOW
        """The peer's limit on open streams."""
        self.is_closing = False
        """True after GOAWAY: no new stream can be opened."""
        self._buffer = FrameBuffer(self.limits.max_frame_bytes)
        self._output: list[bytes | memoryview] = []
        self._streams: dict[int, Stream] = {}
        self._sender = Sender(self._streams, self._output)
        self._next_id = 1
        self._receive_window = CONNECTION_WINDOW
        self._blocks = HeaderBlocks(self.limits.max_header_bytes)
        self._has_settings = False
        self._output.append(contents.start_bytes(self.limits))

    def __len__(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    @property
    def has_output(self) -> bool:
        return bool(self._output)

    def take_output(self) -> list[bytes | memoryview]:
        output = self._output.copy()
        self._output.clear()
        return output

    def receive(self, data: bytes) -> Iterator[Event]:
        """Parses received bytes and yields events. Raises ConnectionFailed."""
        try:
            for frame in self._buffer.frames(data):
                if self._blocks.unfinished is not None or not self._has_settings:
                    self._require_expected(frame)
                handler = _HANDLERS.get(frame.kind)
                event = handler(self, frame) if handler is not None else None
                if event is not None:
                    yield event
        except FrameTooLarge as exc:
            raise ConnectionFailed(FRAME_SIZE_ERROR, str(exc)) from exc

    def open(self, header_block: bytes, body: bytes, prefix: bytes = b"") -> int:
        """Opens a stream with its whole request, and returns the stream id. The body is sent within the peer's windows.

        ``prefix``: bytes to send before the body.
        """
        stream_id, self._next_id = self._next_id, self._next_id + 2
        stream = self._streams[stream_id] = Stream(self._sender.initial_window, self.limits.stream_window)
        if len(header_block) <= self._sender.max_frame_bytes:
            self._output.append(frame_bytes(frames.HEADERS, frames.END_HEADERS, stream_id, header_block))
        else:
            self._output += frames.header_frames(stream_id, header_block, self._sender.max_frame_bytes)
        self._sender.send(stream_id, stream, prefix, body)
        return stream_id

    @property
    def accepts_streams(self) -> bool:
        """Returns False after GOAWAY, or when the stream ids of the connection are used up."""
        return not self.is_closing and self._next_id <= MAX_WINDOW

    @property
    def has_room(self) -> bool:
        """Whether a stream can be opened now, within the peer's limit of open streams."""
        return len(self._streams) < self.max_concurrent_streams and self.accepts_streams

    def is_sent(self, stream_id: int) -> bool:
        """Whether the whole request is in the output."""
        stream = self._streams.get(stream_id)
        return stream is None or stream.unsent is None

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

    def _grant(self, stream_id: int, stream: Stream, size: int) -> None:
        stream.receive_window += size
        stream.unacknowledged -= size
        self._output.append(contents.integer_frame(frames.WINDOW_UPDATE, stream_id, size))

    def reset(self, stream_id: int, code: int = CANCEL) -> None:
        """Ends a stream; later frames of the stream are ignored. A no-op for a stream that has ended."""
        if self._streams.pop(stream_id, None) is not None:
            self._output.append(contents.integer_frame(frames.RST_STREAM, stream_id, code))

    def ping(self, content: bytes) -> None:
        """``content``: 8 bytes that PingAcknowledged repeats."""
        self._output.append(frame_bytes(frames.PING, 0, 0, content))

    def close(self, code: int = NO_ERROR) -> None:
        """Tells the peer that the connection ends."""
        self.is_closing = True
        self._output.append(contents.goaway_frame(code))

    def _require_expected(self, frame: Frame) -> None:
        """Raises ConnectionFailed."""
        block = self._blocks.unfinished
        if block is not None and (frame.kind, frame.stream_id) != (frames.CONTINUATION, block.stream_id):
            raise ConnectionFailed(PROTOCOL_ERROR, "a header block was interrupted")
        if not self._has_settings and frame.kind != frames.SETTINGS:
            raise ConnectionFailed(PROTOCOL_ERROR, "the first frame is not SETTINGS")

    def _on_data(self, frame: Frame) -> Event | None:
        size = len(frame.content)
        self._receive_window -= size
        if self._receive_window < _LOW_WINDOW:
            self._reopen_window()
        stream = self._known_stream(frame)
        if stream is None:
            return None
        stream.receive_window -= size
        if stream.receive_window < 0:
            return self._stream_failed(frame.stream_id, FLOW_CONTROL_ERROR, "the stream's window was not respected")
        is_end = bool(frame.flags & frames.END_STREAM)
        data = contents.unpadded(frame)
        if is_end:
            self._ended(frame.stream_id, stream)
        return DataReceived(frame.stream_id, data, size, is_end)

    def _on_headers(self, frame: Frame) -> Event | None:
        headers = self._blocks.repeated(frame)
        if headers is not None:
            return self._headers_received(frame, headers, is_end=bool(frame.flags & frames.END_STREAM))
        return self._on_part_of_block(frame)

    def _on_part_of_block(self, frame: Frame) -> Event | None:
        block = self._blocks.add(frame)
        if block is None:
            return None
        headers = self._blocks.headers_of(block)
        if headers is not None:
            return self._headers_received(frame, headers, is_end=block.is_end)
        if self._known_stream(frame) is None:
            return None
        reason = f"metadata size exceeds the limit of {self.limits.max_header_bytes} bytes"
        return self._stream_failed(frame.stream_id, ENHANCE_YOUR_CALM, reason)

    def _headers_received(self, frame: Frame, headers: Headers, *, is_end: bool) -> Event | None:
        stream = self._known_stream(frame)
        if stream is None:
            return None
        if is_end:
            self._ended(frame.stream_id, stream)
        return HeadersReceived(frame.stream_id, headers, is_end)

    def _on_rst_stream(self, frame: Frame) -> Event | None:
        code = contents.integer_of(frame)
        if self._known_stream(frame) is None:
            return None
        del self._streams[frame.stream_id]
        return StreamReset(frame.stream_id, code)

    def _on_settings(self, frame: Frame) -> Event | None:
        settings = contents.settings_of(frame)
        if frame.flags & frames.ACK:
            return None
        self._has_settings = True
        for name, value in settings:
            self._set(name, value)
        self._output.append(frame_bytes(frames.SETTINGS, frames.ACK, 0))
        self._sender.send_blocked()
        return None

    def _set(self, name: int, value: int) -> None:
        if name == contents.MAX_CONCURRENT_STREAMS:
            self.max_concurrent_streams = value
        elif name == contents.MAX_FRAME_SIZE:
            self._sender.set_max_frame_bytes(value)
        elif name == contents.INITIAL_WINDOW_SIZE:
            self._sender.set_initial_window(value)

    def _on_push_promise(self, _frame: Frame) -> Event | None:
        raise ConnectionFailed(PROTOCOL_ERROR, "PUSH_PROMISE is switched off")

    def _on_ping(self, frame: Frame) -> Event | None:
        content = contents.ping_of(frame)
        if frame.flags & frames.ACK:
            return PingAcknowledged(content)
        self._output.append(frame_bytes(frames.PING, frames.ACK, 0, content))
        return None

    def _on_goaway(self, frame: Frame) -> Event | None:
        event = contents.goaway_of(frame)
        self.is_closing = True
        for stream_id in [each for each in self._streams if each > event.last_stream_id]:
            del self._streams[stream_id]
        return event

    def _on_window_update(self, frame: Frame) -> Event | None:
        size = contents.integer_of(frame) & MAX_WINDOW
        if not frame.stream_id:
            self._sender.widen(size)
        else:
            stream = self._known_stream(frame)
            if stream is None:
                return None
            stream.send_window += size
            if not size or stream.send_window > MAX_WINDOW:
                return self._stream_failed(frame.stream_id, FLOW_CONTROL_ERROR, "malformed WINDOW_UPDATE")
        self._sender.send_blocked()
        return None

    def _known_stream(self, frame: Frame) -> Stream | None:
        """Returns None for a stream that has ended. Raises ConnectionFailed for a stream that was never opened."""
        stream = self._streams.get(frame.stream_id)
        if stream is None and (frame.stream_id % 2 == 0 or frame.stream_id >= self._next_id):
            raise ConnectionFailed(PROTOCOL_ERROR, "a frame of a stream that was never opened")
        return stream

    def _stream_failed(self, stream_id: int, code: int, reason: str) -> Event:
        self.reset(stream_id, code)
        return StreamReset(stream_id, code, reason)

    def _ended(self, stream_id: int, stream: Stream) -> None:
        """Removes a stream that the peer has answered. An unsent rest of the request is not sent."""
        if stream.unsent is not None:
            self.reset(stream_id, NO_ERROR)
        else:
            del self._streams[stream_id]

    def _reopen_window(self) -> None:
        if self._receive_window < 0:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "the connection's window was not respected")
        grown = CONNECTION_WINDOW - self._receive_window
        self._receive_window = CONNECTION_WINDOW
        self._output.append(contents.integer_frame(frames.WINDOW_UPDATE, 0, grown))


_HANDLERS = {
    frames.DATA: Session._on_data,
    frames.HEADERS: Session._on_headers,
    frames.RST_STREAM: Session._on_rst_stream,
    frames.SETTINGS: Session._on_settings,
    frames.PUSH_PROMISE: Session._on_push_promise,
    frames.PING: Session._on_ping,
    frames.GOAWAY: Session._on_goaway,
    frames.WINDOW_UPDATE: Session._on_window_update,
    frames.CONTINUATION: Session._on_part_of_block,
}
"""Frames of other types, including PRIORITY, are ignored (RFC 9113, 5.5)."""
