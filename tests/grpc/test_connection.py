"""One connection without a network: pauses between the responses of fast streams, and the receive windows.

No call stalls behind a server that never exceeds a window, and answers in random frames.
"""

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar, cast

import pytest

from app.grpc import connection, frames
from app.grpc.connection import Http2Connection, Http2StreamCall, Http2UnaryCall, KeepAlive
from app.grpc.frames import PREFIX_BYTES, STREAM_WINDOW, Frame, FrameBuffer, frame_bytes
from app.grpc.http2_session import SMALLEST_FRAME_LIMIT, Session
from tests.grpc.conftest import (
    OK,
    SETTINGS,
    FakeTransport,
    data_frame,
    headers_frame,
    last_headers,
    message,
    reset_frame,
    status_of,
)
from tests.toolkit.waiting import until

C = TypeVar("C", Http2StreamCall, Http2UnaryCall)


class Server:
    """Passes frames to a connection. Stream 1 has begun."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.connection = Http2Connection(Session(), KeepAlive(300, 20))
        self.connection.connection_made(cast("asyncio.Transport", self.transport))
        self.first = self.started(Http2StreamCall)
        self.send(SETTINGS, headers_frame(1))

    def started(self, kind: type[C]) -> C:
        call = kind(self.connection, 1024 * 1024)
        self.connection.start(call, b"", b"", 10.0)
        return call

    def send(self, *received: bytes) -> None:
        for each in received:
            self.connection.data_received(each)

    def respond(self, stream_id: int) -> None:
        self.send(word(stream_id))


def word(stream_id: int, content: bytes = b"word") -> bytes:
    return data_frame(stream_id, message(content))


OVER = status_of(b"0")


@pytest.fixture
def every_response_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause lasts until the end of the test, unless something ends it."""
    monkeypatch.setattr(connection, "BUSY_GAP_S", 60.0)
    monkeypatch.setattr(connection, "REST_S", 60.0)


@pytest.fixture
async def server(every_response_is_fast: None) -> Server:
    """The first response of stream 1 has arrived."""
    server = Server()
    server.respond(1)
    return server


@pytest.mark.usefixtures("every_response_is_fast")
@pytest.mark.parametrize(
    ("gap_s", "received", "is_reading"),
    [
        (60.0, [], True),
        (60.0, [word(1)], False),
        (0.0, [word(1), word(1)], True),
        (60.0, [word(1, b"x" * 8192)], True),
        (60.0, [last_headers(1, OVER), frame_bytes(frames.PING, 0, 0, b"12345678")], True),
    ],
    ids=["no response", "a fast response", "slow responses", "a large response", "no calls"],
)
async def test_only_fast_streams_are_read_with_pauses(
    monkeypatch: pytest.MonkeyPatch, gap_s: float, received: list[bytes], *, is_reading: bool
) -> None:
    monkeypatch.setattr(connection, "BUSY_GAP_S", gap_s)
    server = Server()
    server.send(*received)
    assert server.transport.is_reading is is_reading


@pytest.mark.usefixtures("every_response_is_fast")
async def test_reading_continues_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.05)
    server = Server()
    server.respond(1)
    assert not server.transport.is_reading
    await until(lambda: server.transport.is_reading)
    assert await anext(server.first) == b"word"


@pytest.mark.parametrize("has_responded", [True, False])
async def test_an_abandoned_stream_ends_the_pauses(server: Server, *, has_responded: bool) -> None:
    """The times of its responses show when Triton can handle its cancellation."""
    other = server.started(Http2StreamCall)
    server.send(headers_frame(3))
    if has_responded:
        server.respond(3)
        assert not server.transport.is_reading
    other.time_arrivals()
    for stream_id in (1, 3, 3, 1):
        server.respond(stream_id)
        assert server.transport.is_reading
    server.send(last_headers(3, OVER))
    server.respond(1)
    assert not server.transport.is_reading


@pytest.mark.parametrize("kind", [Http2UnaryCall, Http2StreamCall])
async def test_a_new_call_ends_the_pause(server: Server, kind: type[Http2StreamCall]) -> None:
    """Its first response is read at once, and so is everything until then."""
    server.started(kind)
    assert server.transport.is_reading
    server.respond(1)
    server.send(headers_frame(3))
    assert server.transport.is_reading


async def test_reading_pauses_again_after_the_answer_of_another_call(server: Server) -> None:
    call = server.started(Http2UnaryCall)
    server.send(headers_frame(3), word(3))
    assert server.transport.is_reading
    server.send(last_headers(3, OVER))
    assert await call.response() == b"word"
    assert not server.transport.is_reading


@pytest.mark.parametrize("end", ["cancelled", "reset"])
async def test_a_call_that_ended_without_a_response_is_not_waited_for(server: Server, end: str) -> None:
    other = server.started(Http2UnaryCall)
    if end == "cancelled":
        other.cancel()
        server.respond(1)
    else:
        server.send(reset_frame(3, 8))
    assert not server.transport.is_reading


async def test_a_response_that_arrives_during_the_pause_is_read(server: Server) -> None:
    """A TLS transport may have decrypted it before."""
    server.send(word(1, b"second"))
    assert (await anext(server.first), await anext(server.first)) == (b"word", b"second")
    assert server.transport.paused == 1


async def test_the_pause_ends_with_the_connection(server: Server) -> None:
    server.connection.connection_lost(None)
    server.connection.fail("again")
    assert (server.transport.paused, server.transport.resumed) == (1, 0)


DEFAULT_WINDOW = 65_535
CONTENT_TYPE = b"\0\x0ccontent-type\x10application/grpc"
LONGEST_PADDING = 255


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
        self._output = [SETTINGS]

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
            return headers_frame(stream_id, OK + CONTENT_TYPE)
        if call.rest:
            return self._data(stream_id, call)
        del self.calls[stream_id]
        return last_headers(stream_id, OVER if call.begun else OK + CONTENT_TYPE + OVER)  # a response of trailers only

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
        return data_frame(stream_id, content, flags)

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
            call.body = b"".join(map(message, call.script))
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


class Exchange:
    """A connection of the client and its peer."""

    def __init__(self, random: Random, scripts: list[list[bytes]], window: int = STREAM_WINDOW) -> None:
        self.random = random
        self.peer = StrictPeer(random, scripts)
        self.connection = Http2Connection(Session(window), KeepAlive(LONG_S, LONG_S))
        self.connection.connection_made(cast("asyncio.Transport", FakeTransport(self.peer.receive)))
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
