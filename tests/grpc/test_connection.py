"""One connection without a network: pauses between the responses of fast streams, and the receive windows.

No call stalls behind a server that never exceeds a window, and answers in random frames.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar, cast

import h2.events
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from app.grpc import connection, frames
from app.grpc.connection import PREFIX_BYTES, Http2Connection, Http2StreamCall, Http2UnaryCall, KeepAlive
from app.grpc.frames import STREAM_WINDOW, frame_bytes
from app.grpc.http2_session import Session
from tests.grpc.conftest import (
    REQUEST,
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
HEAD = [(":status", "200"), ("content-type", "application/grpc")]
LONGEST_PADDING = 255


def message_of(random: Random, largest: int) -> bytes:
    """A message whose size is small as often as large, and often next to ``largest`` or its half."""
    near = random.choice((0, 0, 0, largest // 2, largest))
    size = max(0, near + random.randint(-8, 8)) if near else int(largest ** random.random()) - 1
    return bytes([random.randrange(256)]) * size


@dataclass
class Call:
    """``begun`` and ``sent``: the head, and the bytes of ``body``."""

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
    """Answers the calls of one connection, in order, with the messages of ``scripts``. h2 checks every window."""

    def __init__(self, random: Random, scripts: Sequence[list[bytes]]) -> None:
        self.calls: dict[int, Call] = {}
        self._random = random
        self._scripts = scripts
        self._http2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._http2.initiate_connection()

    def window(self, stream_id: int) -> int:
        """The bytes of a call that the client accepts."""
        return int(self._http2.streams[stream_id].outbound_flow_control_window)

    def receive(self, data: bytes) -> None:
        for event in self._http2.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                self.calls[event.stream_id] = Call()
            elif isinstance(event, h2.events.DataReceived):
                self._widen(event)
            elif isinstance(event, h2.events.StreamEnded):
                call = self.calls[event.stream_id]
                call.script = self._scripts[event.stream_id // 2]
                call.body = b"".join(map(message, call.script))
            elif isinstance(event, h2.events.StreamReset):
                self.calls.pop(event.stream_id, None)

    def _widen(self, event: h2.events.DataReceived) -> None:
        size = event.flow_controlled_length
        if size:
            self._http2.increment_flow_control_window(size)
        room = self._http2.remote_flow_control_window(event.stream_id)
        if not event.stream_ended and room < self._random.randrange(1, DEFAULT_WINDOW):
            grown = self._random.randint(1, 2 * DEFAULT_WINDOW)
            self._http2.increment_flow_control_window(grown, event.stream_id)

    def output(self) -> bytes:
        """Returns what is sent in any case: settings, acknowledgements, and windows for requests."""
        return self._http2.data_to_send()

    def send(self) -> None:
        """Sends the next frame of a random call that may send, if there is one."""
        able = [stream_id for stream_id, call in self.calls.items() if self._can_send(stream_id, call)]
        if not able:
            return
        stream_id = self._random.choice(able)
        call = self.calls[stream_id]
        if not call.begun and (call.body or self._random.random() < 0.5):
            call.begun = True
            self._http2.send_headers(stream_id, HEAD)
        elif call.rest:
            self._send_data(stream_id, call)
        else:
            del self.calls[stream_id]
            end = [("grpc-status", "0")]  # after no head: a response of trailers only
            self._http2.send_headers(stream_id, end if call.begun else HEAD + end, end_stream=True)

    def _can_send(self, stream_id: int, call: Call) -> bool:
        if call.script is None:
            return False
        return not call.begun or not call.rest or self._http2.local_flow_control_window(stream_id) > 0

    def _send_data(self, stream_id: int, call: Call) -> None:
        room = min(self._http2.local_flow_control_window(stream_id), self._http2.max_outbound_frame_size)
        size = min(room, call.rest)
        if self._random.random() < 0.6:
            size = max(1, int(size ** self._random.random()))
        content = call.body[call.sent : call.sent + size]
        call.sent += size
        padding = self._random.randrange(LONGEST_PADDING) if self._random.random() < 0.1 else None
        if padding is not None and size + padding + 1 > room:
            padding = None
        self._http2.send_data(stream_id, content, pad_length=padding)


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
        self.receive(self.peer.output())

    def receive(self, data: bytes) -> None:
        """Passes bytes of the peer to the client, cut anywhere."""
        cut = self.random.randrange(len(data) + 1) if self.random.random() < 0.3 else 0
        for part in (data[:cut], data[cut:]):
            if part:
                self.connection.data_received(part)

    def send(self) -> bool:
        """Passes the next frame of the peer to the client. Returns False if the peer may not send."""
        self.peer.send()
        data = self.peer.output()
        self.receive(data)
        return bool(data)

    def close(self) -> None:
        self.connection.connection_lost(None)


class Reader:
    """Reads one call, a message with each :meth:`step`."""

    def __init__(self, exchange: Exchange, *, is_stream: bool) -> None:
        kind = Http2StreamCall if is_stream else Http2UnaryCall
        self.call: Any = kind(exchange.connection, LIMIT)
        exchange.connection.start(self.call, REQUEST, bytes(exchange.random.choice((0, 10, 200_000))), LONG_S)
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
            if self._reading is not None:
                self._reading.result()  # raises its error
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
            stream_id = 2 * seed + 1
            call = exchange.peer.calls.get(stream_id)
            most = call and each.max_window(window, call)
            assert most is None or exchange.peer.window(stream_id) <= most, "the window is too large"
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
