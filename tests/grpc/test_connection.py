"""The connection reads with pauses between the responses of fast streams."""

import asyncio
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from app.grpc import connection, frames
from app.grpc.connection import Http2Connection, Http2StreamCall, Http2UnaryCall, KeepAlive
from app.grpc.frames import frame_bytes
from app.grpc.http2_session import Session

HEAD = b"\x88"
"""``:status: 200``."""
OK = b"\x00\x0bgrpc-status\x010"
TIMEOUT_S = 10.0


class Transport:
    """Records whether the connection reads."""

    def __init__(self) -> None:
        self.is_reading = True
        self.calls = SimpleNamespace(paused=0, resumed=0)

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False
        self.calls.paused += 1

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True
        self.calls.resumed += 1

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


class Server:
    """Passes frames to a connection without a network."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.connection = Http2Connection(Session(), KeepAlive(300, 20))
        self.connection.connection_made(cast("asyncio.Transport", self.transport))
        self.connection.data_received(frame_bytes(frames.SETTINGS, 0, 0))

    @classmethod
    def with_a_stream(cls) -> "Server":
        """The first response of stream 1 has arrived."""
        server = cls()
        server.stream()
        server.begin(1)
        server.respond(1)
        return server

    def stream(self) -> Http2StreamCall:
        call = Http2StreamCall(self.connection, 1024 * 1024)
        self.connection.start(call, b"", b"", TIMEOUT_S)
        return call

    def unary(self) -> Http2UnaryCall:
        call = Http2UnaryCall(self.connection, 1024 * 1024)
        self.connection.start(call, b"", b"", TIMEOUT_S)
        return call

    def begin(self, stream_id: int) -> None:
        self.connection.data_received(frame_bytes(frames.HEADERS, frames.END_HEADERS, stream_id, HEAD))

    def respond(self, stream_id: int, message: bytes = b"word") -> None:
        content = struct.pack(">BI", 0, len(message)) + message
        self.connection.data_received(frame_bytes(frames.DATA, 0, stream_id, content))

    def end(self, stream_id: int) -> None:
        flags = frames.END_HEADERS | frames.END_STREAM
        self.connection.data_received(frame_bytes(frames.HEADERS, flags, stream_id, OK))


@pytest.fixture(autouse=True)
def _every_response_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause lasts until the end of the test, unless something ends it."""
    monkeypatch.setattr(connection, "BUSY_GAP_S", 60.0)
    monkeypatch.setattr(connection, "REST_S", 60.0)


async def test_a_fast_stream_is_read_with_pauses() -> None:
    server = Server()
    server.stream()
    server.begin(1)
    assert server.transport.is_reading
    server.respond(1)
    assert not server.transport.is_reading


async def test_a_slow_stream_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BUSY_GAP_S", 0.0)
    server = Server.with_a_stream()
    server.respond(1)
    assert server.transport.is_reading


async def test_reading_continues_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.05)
    server = Server()
    call = server.stream()
    server.begin(1)
    server.respond(1)
    assert not server.transport.is_reading
    async with asyncio.timeout(TIMEOUT_S):
        while not server.transport.is_reading:
            await asyncio.sleep(0.01)
    assert await anext(call) == b"word"


@pytest.mark.parametrize("has_responded", [True, False])
async def test_an_abandoned_stream_ends_the_pauses(has_responded: bool) -> None:
    """The times of its responses show when Triton can handle its cancellation."""
    server = Server()
    server.stream()
    server.begin(1)
    server.respond(1)
    other = server.stream()
    server.begin(3)
    if has_responded:
        server.respond(3)
        assert not server.transport.is_reading
    other.time_arrivals()
    for stream_id in (1, 3, 3, 1):
        server.respond(stream_id)
        assert server.transport.is_reading
    server.end(3)
    server.respond(1)
    assert not server.transport.is_reading


@pytest.mark.parametrize("start", [Server.unary, Server.stream])
async def test_a_new_call_ends_the_pause(start: Callable[[Server], object]) -> None:
    """Its first response is read at once, and so is everything until then."""
    server = Server.with_a_stream()
    start(server)
    assert server.transport.is_reading
    server.respond(1)
    server.begin(3)
    assert server.transport.is_reading


async def test_reading_pauses_again_after_the_answer_of_another_call() -> None:
    server = Server.with_a_stream()
    call = server.unary()
    server.begin(3)
    server.respond(3)
    assert server.transport.is_reading
    server.end(3)
    assert await call.response() == b"word"
    assert not server.transport.is_reading


@pytest.mark.parametrize("code", ["cancelled", "reset"])
async def test_a_call_that_ended_without_a_response_is_not_waited_for(code: str) -> None:
    server = Server.with_a_stream()
    other = server.unary()
    if code == "cancelled":
        other.cancel()
        server.respond(1)
    else:
        server.connection.data_received(frame_bytes(frames.RST_STREAM, 0, 3, b"\0\0\0\x08"))
    assert not server.transport.is_reading


async def test_a_response_that_arrives_during_the_pause_is_read() -> None:
    """A TLS transport may have decrypted it before."""
    server = Server()
    call = server.stream()
    server.begin(1)
    server.respond(1, b"first")
    server.respond(1, b"second")
    assert (await anext(call), await anext(call)) == (b"first", b"second")
    assert server.transport.calls.paused == 1


async def test_a_large_response_is_read_at_once() -> None:
    server = Server()
    server.stream()
    server.begin(1)
    server.respond(1, b"x" * 8192)
    assert server.transport.is_reading


async def test_a_connection_without_calls_is_read_at_once() -> None:
    server = Server()
    server.stream()
    server.begin(1)
    server.end(1)
    server.connection.data_received(frame_bytes(frames.PING, 0, 0, b"12345678"))
    assert server.transport.is_reading


async def test_the_pause_ends_with_the_connection() -> None:
    server = Server.with_a_stream()
    server.connection.connection_lost(None)
    server.connection.fail("again")
    assert (server.transport.calls.paused, server.transport.calls.resumed) == (1, 0)
