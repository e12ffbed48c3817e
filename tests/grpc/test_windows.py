"""The receive windows: no call stalls behind a server that never exceeds one, and answers in random frames."""

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import pytest

from app.grpc import frames
from app.grpc.connection import Http2Connection, Http2StreamCall, Http2UnaryCall, KeepAlive
from app.grpc.frames import PREFIX_BYTES, STREAM_WINDOW, Frame, FrameBuffer, frame_bytes
from app.grpc.http2_session import SMALLEST_FRAME_LIMIT, Session

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


@dataclass
class Call:
    """``window``: the bytes that the client accepts. ``begun`` and ``sent``: the head, and the bytes of ``body``."""

    window: int
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
    """Answers the calls of one connection, in order, with the messages of ``scripts``."""

    def __init__(self, random: Random, scripts: Sequence[list[bytes]]) -> None:
        self.calls: dict[int, Call] = {}
        self._random = random
        self._scripts = scripts
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
        if frame.flags & frames.END_STREAM:
            call.script = self._scripts[frame.stream_id // 2]
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


LIMIT = 64 * 1024 * 1024
LONG_S = 600.0
WINDOWS = (64, 300, 4096, STREAM_WINDOW)


class PeerTransport:
    """Passes the client's bytes to the peer."""

    def __init__(self, peer: StrictPeer) -> None:
        self._peer = peer

    def write(self, data: bytes) -> None:
        self._peer.receive(data)

    def writelines(self, parts: list[bytes]) -> None:
        self._peer.receive(b"".join(parts))

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


class Exchange:
    """A connection of the client and its peer."""

    def __init__(self, random: Random, scripts: list[list[bytes]], window: int = STREAM_WINDOW) -> None:
        self.random = random
        self.peer = StrictPeer(random, scripts)
        self.connection = Http2Connection(Session(window), KeepAlive(LONG_S, LONG_S))
        self.connection.connection_made(cast("asyncio.Transport", PeerTransport(self.peer)))
        self.receive(self.peer.take_output())

    def receive(self, data: bytes) -> None:
        """Passes bytes of the peer to the client, cut anywhere."""
        cut = self.random.randrange(len(data) + 1) if self.random.random() < 0.3 else 0
        for part in (data[:cut], data[cut:]):
            if part:
                self.connection.data_received(part)

    def send(self) -> bool:
        """Passes the next frame of the peer to the client. Returns False if the peer may not send."""
        data = self.peer.take_output() + self.peer.send()
        self.receive(data)
        return bool(data)

    def close(self) -> None:
        self.connection.connection_lost(None)


class Reader:
    """Reads one call, a message with each :meth:`step`."""

    def __init__(self, exchange: Exchange, *, is_stream: bool) -> None:
        kind = Http2StreamCall if is_stream else Http2UnaryCall
        self.call: Any = kind(exchange.connection, LIMIT)
        exchange.connection.start(self.call, b"", bytes(exchange.random.choice((0, 10, 200_000))), LONG_S)
        self.messages: list[bytes] = []
        self.is_over = False
        self._is_stream = is_stream
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def step(self) -> None:
        """Begins to read the next message, unless the reader waits for it."""
        if not self.is_waiting:
            self._reading = asyncio.create_task(self._read())
        await asyncio.sleep(0)

    async def _read(self) -> None:
        try:
            self.messages.append(await (anext(self.call) if self._is_stream else self.call.response()))
            self.is_over = not self._is_stream
        except StopAsyncIteration:
            self.is_over = True

    def max_window(self, window: int, call: Call) -> int:
        """Returns the largest allowed window of the peer: for one window, or for the message that the reader awaits."""
        if not self._is_stream:
            return max(window, call.rest)
        read = sum(len(each) + PREFIX_BYTES for each in self.messages)
        sizes = [len(each) + PREFIX_BYTES for each in (call.script or [])[len(self.messages) :]]
        return max(window, sizes[0] if sizes and self.is_waiting else 0, call.sent - read) - (call.sent - read)


async def exchanged(random: Random) -> int:
    """Runs some calls on one connection. Returns their number."""
    window = random.choice(WINDOWS)
    kinds = [random.random() < 0.8 for _ in range(random.randint(1, 4))]
    scripts = [
        [message_of(random, 3 * window) for _ in range(random.randint(0, 5) if is_stream else 1)] for is_stream in kinds
    ]
    exchange = Exchange(random, scripts, window)
    readers = [Reader(exchange, is_stream=is_stream) for is_stream in kinds]
    pace = random.random()
    open_readers = list(readers)
    await asyncio.sleep(0)
    while open_readers:
        is_sent = random.random() < pace and exchange.send()
        reader = random.choice(open_readers)
        if not is_sent and all(each.is_waiting for each in open_readers):
            is_sent = exchange.send()
            assert is_sent, "the readers wait, and the windows stop the peer"
        await reader.step()
        for seed, each in enumerate(readers):
            call = exchange.peer.calls.get(2 * seed + 1)
            assert call is None or call.window <= each.max_window(window, call), "the window is too large"
        open_readers = [each for each in open_readers if not each.is_over]
    assert [each.messages for each in readers] == scripts
    exchange.close()
    return len(readers)


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(7200)])])
async def test_no_call_stalls(count: int) -> None:
    done, seed = 0, 0
    while done < count:
        try:
            done += await exchanged(Random(seed))
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
        seed += 1
