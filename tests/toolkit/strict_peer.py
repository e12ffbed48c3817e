"""A gRPC server without I/O that never exceeds a flow-control window, and answers in random frames.

The script of a call follows from the seed in its request, so that a test knows the answer too.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from app.grpc import frames
from app.grpc.frames import Frame, FrameBuffer, frame_bytes
from app.grpc.http2_session import SMALLEST_FRAME_LIMIT

DEFAULT_WINDOW = 65_535
HEAD = b"\x88" + b"\0\x0ccontent-type\x10application/grpc"
"""``:status: 200``, ``content-type: application/grpc``."""
END = frames.END_HEADERS | frames.END_STREAM
LONGEST_PADDING = 255
TRAILERS = b"\x10\x0bgrpc-status\x010"


def message_of(random: Random, largest: int) -> bytes:
    """A message whose size is small as often as large, and often next to ``largest`` or its half."""
    near = random.choice((0, 0, 0, largest // 2, largest))
    size = max(0, near + random.randint(-8, 8)) if near else int(largest ** random.random()) - 1
    return bytes([random.randrange(256)]) * size


def request_of(seed: int, size: int = 0) -> bytes:
    """Returns a request that selects a script, with ``size`` further bytes."""
    return struct.pack(">Q", seed) + bytes(size)


@dataclass
class Call:
    """``window``: the bytes that the client accepts. ``begun`` and ``sent``: the head, and the bytes of ``body``."""

    window: int
    request: bytearray = field(default_factory=bytearray)
    request_window: int = DEFAULT_WINDOW
    script: list[bytes] | None = None
    """The messages of the answer."""
    body: bytes = b""
    begun: bool = False
    sent: int = 0

    @property
    def rest(self) -> int:
        """The bytes of the answer that are still to send."""
        return len(self.body) - self.sent


class StrictPeer:
    """``script_of`` maps the seed of a request to the messages of its answer."""

    def __init__(self, random: Random, script_of: Callable[[int], list[bytes]]) -> None:
        self.calls: dict[int, Call] = {}
        self._random = random
        self._script_of = script_of
        self._frames = FrameBuffer(2**24)
        self._preface = b""
        self._window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._max_frame_bytes = SMALLEST_FRAME_LIMIT
        self._output = [frame_bytes(frames.SETTINGS, 0, 0)]

    def receive(self, data: bytes) -> None:
        if len(self._preface) < len(frames.PREFACE):
            missing = len(frames.PREFACE) - len(self._preface)
            self._preface += data[:missing]
            data = data[missing:]
        for frame in self._frames.frames(data):
            self._received(frame)

    def take_output(self) -> bytes:
        """Returns what is sent in any case: acknowledgements, and windows for requests."""
        output = b"".join(self._output)
        self._output.clear()
        return output

    def send(self) -> bytes:
        """Returns the next frame of a random call that may send; empty if there is none."""
        able = [stream_id for stream_id, call in self.calls.items() if self._can_send(call)]
        if not able:
            return b""
        stream_id = self._random.choice(able)
        call = self.calls[stream_id]
        if not call.begun and (call.body or self._random.random() < 0.5):
            call.begun = True
            return frame_bytes(frames.HEADERS, frames.END_HEADERS, stream_id, HEAD)
        if call.rest:
            return self._data(stream_id, call)
        del self.calls[stream_id]
        trailers = TRAILERS if call.begun else HEAD + TRAILERS  # a response of trailers only
        return frame_bytes(frames.HEADERS, END, stream_id, trailers)

    def _can_send(self, call: Call) -> bool:
        if call.script is None:
            return False
        return not call.begun or not call.rest or min(call.window, self._window) > 0

    def _data(self, stream_id: int, call: Call) -> bytes:
        room = min(call.window, self._window, self._max_frame_bytes)
        size = min(room, call.rest)
        if self._random.random() < 0.6:
            size = max(1, int(size ** self._random.random()))
        content = call.body[call.sent : call.sent + size]
        call.sent += size
        padding = self._random.randrange(LONGEST_PADDING) if self._random.random() < 0.1 else -1
        used = size + padding + 1
        if padding < 0 or used > room:
            used, flags = size, 0
        else:
            content, flags = bytes([padding]) + content + bytes(padding), frames.PADDED
        call.window -= used
        self._window -= used
        return frame_bytes(frames.DATA, flags, stream_id, content)

    def _received(self, frame: Frame) -> None:
        if frame.kind == frames.HEADERS:
            self.calls[frame.stream_id] = Call(self._initial_window)
        elif frame.kind == frames.DATA:
            self._received_request(frame)
        elif frame.kind == frames.WINDOW_UPDATE:
            self._widen(frame.stream_id, int.from_bytes(frame.content, "big"))
        elif frame.kind == frames.RST_STREAM:
            self.calls.pop(frame.stream_id, None)
        elif frame.kind == frames.SETTINGS and not frame.flags & frames.ACK:
            self._configure(dict(struct.iter_unpack(">HI", frame.content)))
        elif frame.kind == frames.PING and not frame.flags & frames.ACK:
            self._output.append(frame_bytes(frames.PING, frames.ACK, 0, frame.content))

    def _received_request(self, frame: Frame) -> None:
        call = self.calls.get(frame.stream_id)
        if call is None:
            return
        call.request_window -= len(frame.content)
        assert call.request_window >= 0, "the client exceeded a window"
        call.request += frame.content
        if frame.flags & frames.END_STREAM:
            (seed,) = struct.unpack_from(">Q", call.request, 5)
            call.script = self._script_of(seed)
            call.body = b"".join(struct.pack(">BI", 0, len(each)) + each for each in call.script)
        elif call.request_window < self._random.randrange(1, DEFAULT_WINDOW):
            grown = self._random.randint(1, 2 * DEFAULT_WINDOW)
            call.request_window += grown
            self._output.append(frames.integer_frame(frames.WINDOW_UPDATE, frame.stream_id, grown))
        if frame.content:
            self._output.append(frames.integer_frame(frames.WINDOW_UPDATE, 0, len(frame.content)))

    def _widen(self, stream_id: int, size: int) -> None:
        assert size > 0
        if not stream_id:
            self._window += size
        elif stream_id in self.calls:
            self.calls[stream_id].window += size

    def _configure(self, settings: dict[int, int]) -> None:
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self._initial_window)
        for call in self.calls.values():
            call.window += window - self._initial_window
        self._initial_window = window
        self._max_frame_bytes = settings.get(frames.MAX_FRAME_SIZE, self._max_frame_bytes)
        self._output.append(frame_bytes(frames.SETTINGS, frames.ACK, 0))
