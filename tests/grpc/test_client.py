"""The client with servers that violate the protocol: each call ends with an RpcError, and the next call works."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from app.grpc import frames
from app.grpc import http2_session as session
from app.grpc.client import Client
from app.grpc.connection import PREFIX, Http2Connection, Http2UnaryCall, KeepAlive
from app.grpc.frames import Frame, frame_bytes
from app.grpc.http2_session import FrameBuffer, Session
from app.grpc.rpc import LATER_S, RpcError
from app.triton.credentials import TlsFiles
from tests.grpc.conftest import (
    OK,
    SETTINGS,
    FakeTransport,
    data_frame,
    field,
    goaway,
    headers_frame,
    last_headers,
    message,
    reset_frame,
    settings_frame,
    status_of,
)
from tests.toolkit.waiting import until

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ONE_AT_A_TIME = settings_frame(3, 1)
LIMIT = 1024 * 1024


def answer(stream_id: int, content: bytes = b"fine") -> bytes:
    return headers_frame(stream_id) + data_frame(stream_id, message(content)) + last_headers(stream_id, status_of(b"0"))


@asynccontextmanager
async def server(*talks: Talk) -> AsyncIterator[str]:
    """Serves each connection with the next of ``talks``. The last one serves all further connections."""
    left = list(talks)
    running: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        talk = left.pop(0) if len(left) > 1 else left[0]
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for task in running:
            task.cancel()


def client(url: str, keep_alive: KeepAlive | None = None) -> Client:
    return Client(url, keep_alive or KeepAlive(300.0, 20.0), LIMIT)


async def called(opened: Client, timeout_s: float = 10.0) -> bytes:
    return await (await opened.unary("/test/Unary", b"question", timeout_s)).response()


async def error_of(opened: Client, timeout_s: float = 10.0) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await called(opened, timeout_s)
    return caught.value


async def frames_of(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    """Reads the preface, and yields the frames after it."""
    await reader.readexactly(len(frames.PREFACE))
    buffer = FrameBuffer(2**24)
    while data := await reader.read(65536):
        for frame in buffer.frames(data):
            yield frame


def ends_request(frame: Frame) -> bool:
    return frame.kind == frames.DATA and bool(frame.flags & frames.END_STREAM)


async def request(reader: asyncio.StreamReader) -> int:
    """Reads until the end of a request. Returns the id of its stream."""
    return await anext(frame.stream_id async for frame in frames_of(reader) if ends_request(frame))


def replying(*parts: bytes, closed: asyncio.Event | None = None) -> Talk:
    """Answers the first request (stream 1) with these bytes. Sets ``closed`` when the client closes the connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(SETTINGS + b"".join(parts))
        while await reader.read(65536):
            pass
        if closed is not None:
            closed.set()

    return talk


GOOD = replying(answer(1))


@pytest.mark.parametrize(
    ("received", "code"),
    [
        (last_headers(1), "INTERNAL"),
        (last_headers(1, OK + status_of(b"0")), "INTERNAL"),
        (last_headers(1, OK + status_of(b"99")), "UNKNOWN"),
        (last_headers(1, OK + status_of(b"-1")), "UNKNOWN"),
        (last_headers(1, OK + status_of(b"5") + field(b"grpc-message", b"%ff%E4%")), "NOT_FOUND"),
        (last_headers(1, field(b":status", b"503")), "UNAVAILABLE"),
        (last_headers(1, field(b":status", b"404")), "UNIMPLEMENTED"),
        (
            headers_frame(1, field(b":status", b"503")) + data_frame(1, b"<html>no upstream</html>", frames.END_STREAM),
            "UNAVAILABLE",
        ),
        (
            headers_frame(1, field(b":status", b"403")) + data_frame(1, b"<html>", frames.END_STREAM),
            "PERMISSION_DENIED",
        ),
        (reset_frame(1, 7), "UNAVAILABLE"),
        (reset_frame(1, 8), "CANCELLED"),
        (reset_frame(1, 11), "RESOURCE_EXHAUSTED"),
        (reset_frame(1, 999), "INTERNAL"),
        (headers_frame(1) + data_frame(1, message(b"one") + message(b"two")), "INTERNAL"),
        (headers_frame(1) + data_frame(1, message(b"fine"), frames.END_STREAM), "INTERNAL"),
        (headers_frame(1) + data_frame(1, message(b"cut")[:-1]) + last_headers(1, status_of(b"0")), "INTERNAL"),
        (headers_frame(1) + data_frame(1, b"\x01" + message(b"packed")[1:]), "INTERNAL"),
        (headers_frame(1) + data_frame(1, PREFIX.pack(0, LIMIT + 1)), "RESOURCE_EXHAUSTED"),
        (headers_frame(1) + data_frame(1, b"x" * 100_000), "INTERNAL"),
        (goaway(0), "UNAVAILABLE"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE"),
        (frame_bytes(frames.PUSH_PROMISE, 0, 1, b"\0\0\0\x02"), "UNAVAILABLE"),
        (b"\xff" * 64, "UNAVAILABLE"),
    ],
)
async def test_after_an_invalid_answer_the_next_call_works(received: bytes, code: str) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(SETTINGS + received)
        if (await reader.read(1)) and code != "UNAVAILABLE":
            # The connection stays open for the next request.
            while True:
                writer.write(answer(3))
                await asyncio.sleep(0.05)
                if not await reader.read(65536):
                    return

    async with server(broken, GOOD) as url:
        opened = client(url)
        assert (await error_of(opened)).code == code
        tasks = len(asyncio.all_tasks())
        await opened.close()
        assert await called(client(url)) == b"fine"
        assert len(asyncio.all_tasks()) <= tasks + 1


async def test_calls_excluded_by_goaway_were_not_sent() -> None:
    async with server(replying(goaway(0)), GOOD) as url:
        opened = client(url)
        error = await error_of(opened)
        assert (error.code, error.was_sent) == ("UNAVAILABLE", False)
        assert await called(opened) == b"fine"


@pytest.mark.parametrize(
    ("parts", "last_stream_id"),
    [((goaway(1), answer(1)), session.MAX_WINDOW), ((answer(1), goaway(1)), session.MAX_WINDOW), ((answer(1),), 1)],
    ids=["GOAWAY during a call", "GOAWAY while idle", "no further stream ids"],
)
async def test_a_connection_closes_after_its_last_call(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...], last_stream_id: int
) -> None:
    monkeypatch.setattr(session, "MAX_WINDOW", last_stream_id)
    closed = asyncio.Event()
    async with server(replying(*parts, closed=closed), GOOD) as url:
        opened = client(url)
        assert await called(opened) == b"fine"
        await asyncio.wait_for(closed.wait(), 5.0)
        assert await called(opened) == b"fine"
        await opened.close()


async def test_a_cancelled_last_call_closes_the_connection_too() -> None:
    closed = asyncio.Event()
    async with server(replying(goaway(1), closed=closed), GOOD) as url:
        call = await client(url).unary("/test/Unary", b"question", 10.0)
        await until(lambda: call._connection.session.is_closing)
        call.cancel()
        await asyncio.wait_for(closed.wait(), 5.0)


async def test_closing_the_client_closes_older_connections() -> None:
    closed = asyncio.Event()
    async with server(replying(goaway(1), closed=closed), GOOD) as url:
        opened = client(url)
        older = await opened.unary("/test/Unary", b"question", 10.0)
        await until(lambda: older._connection.session.is_closing)
        assert await called(opened) == b"fine"
        await opened.close()
        await asyncio.wait_for(closed.wait(), 5.0)
        with pytest.raises(RpcError):
            await older.response()


async def test_an_unanswered_ping_closes_the_connection() -> None:
    async with server(replying(), GOOD) as url:
        opened = client(url, KeepAlive(0.05, 0.05))
        error = await error_of(opened)
        assert (error.code, error.details) == ("UNAVAILABLE", "the server did not answer a ping")
        assert await called(opened) == b"fine"


async def test_the_stream_limit_of_the_server_is_respected() -> None:
    open_now, peak = 0, 0

    async def limited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, peak
        writer.write(ONE_AT_A_TIME)
        async for frame in frames_of(reader):
            if frame.kind == frames.HEADERS:
                open_now += 1
                peak = max(peak, open_now)
            if ends_request(frame):
                await asyncio.sleep(0.01)
                open_now -= 1
                writer.write(answer(frame.stream_id))

    async with server(limited) as url:
        opened = client(url)
        assert await called(opened) == b"fine"
        assert await asyncio.gather(*(called(opened) for _ in range(8))) == [b"fine"] * 8
        assert peak == 1


async def test_waiting_for_a_stream_counts_against_the_deadline() -> None:
    blocks: list[bytes] = []

    async def listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ONE_AT_A_TIME)
        async for frame in frames_of(reader):
            if frame.kind == frames.HEADERS:
                blocks.append(frame.content)

    async with server(listening) as url:
        opened = client(url)
        first = await opened.unary("/test/Unary", b"question", 10.0)
        await asyncio.sleep(0.05)
        second = asyncio.create_task(error_of(opened, timeout_s=0.5))
        await asyncio.sleep(0)
        began = time.monotonic()  # the call has begun
        await asyncio.sleep(0.2)
        waited_s = time.monotonic() - began
        first.cancel()
        assert (await second).code == "DEADLINE_EXCEEDED"
    sent_ms = int(blocks[1].rpartition(b"grpc-timeout")[2][1:-1])
    assert waited_s > 0.1
    assert 0 < sent_ms - LATER_S * 1000 <= (0.5 - waited_s) * 1000 + 1


async def test_the_deadline_can_pass_while_connecting() -> None:
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await asyncio.sleep(3600)

    async with server(silent) as url:
        opened = Client(url, KeepAlive(300.0, 20.0), LIMIT, tls=TlsFiles().followed())
        error = await error_of(opened, timeout_s=0.05)
        assert (error.code, error.was_sent) == ("DEADLINE_EXCEEDED", False)


async def test_a_waiting_call_moves_to_the_next_connection() -> None:
    may_close = asyncio.Event()

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ONE_AT_A_TIME)
        await request(reader)
        await may_close.wait()

    async with server(closing, GOOD) as url:
        opened = client(url)
        first = asyncio.create_task(error_of(opened))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(called(opened))
        await asyncio.sleep(0.05)
        may_close.set()
        assert (await first).code == "UNAVAILABLE"
        assert await asyncio.wait_for(second, 5.0) == b"fine"


async def test_a_connection_that_is_lost_at_once_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transport has no socket any more when the options are set."""

    async def connect(
        protocol: Callable[[], Http2Connection], *_: object, **__: object
    ) -> tuple[FakeTransport, Http2Connection]:
        return FakeTransport(), protocol()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    with pytest.raises(RpcError) as caught:
        await client("127.0.0.1:1").unary("/x", b"", 5.0)
    assert (caught.value.code, caught.value.was_sent) == ("UNAVAILABLE", False)


async def test_calls_fail_at_once_between_connection_attempts() -> None:
    opened = client("127.0.0.1:1")
    first, second = await error_of(opened), await error_of(opened)
    assert (first.was_sent, second.was_sent) == (False, False)
    assert first.details.startswith("failed to connect to 127.0.0.1:1")
    assert second.details == "no connection to 127.0.0.1:1"


async def test_no_call_is_written_to_a_lost_connection() -> None:
    written: list[bytes] = []
    connection = Http2Connection(Session(), KeepAlive(300.0, 20.0))
    connection.connection_made(cast("asyncio.Transport", FakeTransport(written.append)))
    before = len(written)
    call = Http2UnaryCall(connection, LIMIT)
    connection.start(call, b"", b"question", 10.0)
    connection.connection_lost(None)
    await asyncio.sleep(0.01)
    assert len(written) == before
    with pytest.raises(RpcError):
        await call.response()
