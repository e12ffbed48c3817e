"""Sends request bodies within the flow-control windows of the peer. Source: RFC 9113, 5.2."""

from collections import deque

from msgspec import Struct

from app.triton.grpc import frames
from app.triton.grpc.contents import DEFAULT_WINDOW, MAX_WINDOW
from app.triton.grpc.events import FLOW_CONTROL_ERROR, PROTOCOL_ERROR, ConnectionFailed
from app.triton.grpc.frames import frame_bytes, frame_header

SMALLEST_FRAME_LIMIT = 16_384
LARGEST_FRAME_LIMIT = 2**24 - 1


class Stream(Struct, eq=False):
    send_window: int
    receive_window: int
    unsent: deque[memoryview] | None = None
    unacknowledged: int = 0
    """Read bytes that were not returned to the receive window. Negative: bytes that were granted in advance."""


class Sender:
    """Writes DATA frames to ``output``. A body that exceeds the windows waits in its stream."""

    def __init__(self, streams: dict[int, Stream], output: list[bytes | memoryview]) -> None:
        self.initial_window = DEFAULT_WINDOW
        """The send window of a new stream."""
        self._streams = streams
        self._output = output
        self._window = DEFAULT_WINDOW
        self.max_frame_bytes = SMALLEST_FRAME_LIMIT
        self._blocked: deque[int] = deque()

    def send(self, stream_id: int, stream: Stream, prefix: bytes, body: bytes) -> None:
        """Sends the whole body, now or later. A large body is not copied."""
        size = len(prefix) + len(body)
        if size <= self.max_frame_bytes and size <= stream.send_window and size <= self._window:
            self._window -= size
            self._output.append(frame_bytes(frames.DATA, frames.END_STREAM, stream_id, prefix + body))
        else:
            stream.unsent = deque(memoryview(part) for part in (prefix, body) if part)
            self._blocked.append(stream_id)
            self.send_blocked()

    def widen(self, size: int) -> None:
        """Adds ``size`` bytes to the connection's window, as the peer requested. Raises ConnectionFailed."""
        self._window += size
        if not size or self._window > MAX_WINDOW:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "malformed WINDOW_UPDATE")

    def set_max_frame_bytes(self, value: int) -> None:
        """Raises ConnectionFailed."""
        if not SMALLEST_FRAME_LIMIT <= value <= LARGEST_FRAME_LIMIT:
            raise ConnectionFailed(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of range")
        self.max_frame_bytes = value

    def set_initial_window(self, value: int) -> None:
        """Sets the window of new streams and adjusts the windows of open streams. Raises ConnectionFailed."""
        if value > MAX_WINDOW:
            raise ConnectionFailed(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE out of range")
        change, self.initial_window = value - self.initial_window, value
        for stream in self._streams.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFailed(FLOW_CONTROL_ERROR, "a stream's window is too large")

    def send_blocked(self) -> None:
        """Sends waiting bodies within the windows, one frame of each stream in turn."""
        is_sending = True
        while is_sending and self._window:
            is_sending = False
            for _ in range(len(self._blocked)):
                stream_id = self._blocked.popleft()
                stream = self._streams.get(stream_id)
                if stream is None or stream.unsent is None:
                    continue
                is_sending |= self._send_frame(stream_id, stream, stream.unsent)
                if stream.unsent is not None:
                    self._blocked.append(stream_id)

    def _send_frame(self, stream_id: int, stream: Stream, unsent: deque[memoryview]) -> bool:
        """Sends the next part of a body. False if the windows are closed."""
        size = min(len(unsent[0]), self.max_frame_bytes, stream.send_window, self._window)
        if size <= 0:
            return False
        stream.send_window -= size
        self._window -= size
        part = unsent.popleft()
        if size < len(part):
            unsent.appendleft(part[size:])
        flags = 0 if unsent else frames.END_STREAM
        self._output += (frame_header(frames.DATA, flags, stream_id, size), part[:size])
        stream.unsent = unsent or None
        return True
