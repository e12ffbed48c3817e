"""The limits of one WebSocket: memory, time, and what waits while the application takes nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from app.core.errors import ClientClosedRequest, TooManyRequests
from app.http1.websocket import CloseReason, SocketTerms, WebSocket
from tests.toolkit.listener import connected, listening
from tests.toolkit.waiting import PATIENCE_S, until
from tests.toolkit.websocket_client import BINARY, CONTINUATION, TEXT, connected_to, frame, handshake

MIB = 1024 * 1024
HEAD_BYTES = 14
"""Of a large frame with a mask."""


class Application:
    """Opens a WebSocket for each request, and leaves it to the test."""

    def __init__(self) -> None:
        self.held = 0
        self.max_bytes = 10 * MIB
        self.message_s = 60.0
        self.ping_s = 60.0
        self.send_s = 0.2
        self.opened: asyncio.Queue[WebSocket] = asyncio.Queue()

    async def __call__(self, scope: Any, _receive: Any, _send: Any) -> None:
        send_s, release = self.send_s, lambda size: self.hold(-size)
        terms = SocketTerms(self.ping_s, send_s, send_s, self.message_s, self.hold, release)
        protocol = ServerProtocol(state=OPEN, max_size=8 * MIB)
        received = Headers([(name.decode(), value.decode()) for name, value in scope["headers"]])
        response = protocol.accept(Request("/", received))
        headers = [(name.encode(), value.encode()) for name, value in response.headers.raw_items()]
        websocket = scope["state"]["connection"].upgrade(protocol, headers, terms)
        self.opened.put_nowait(websocket)
        await websocket.ended()

    def hold(self, size: int) -> None:
        if size > 0 and self.held + size > self.max_bytes:
            raise TooManyRequests("That is too much.")
        self.held += size


@pytest.fixture
def app() -> Application:
    return Application()


@pytest.fixture
async def port(app: Application) -> AsyncIterator[int]:
    async with listening(app) as port:
        yield port


async def opened_by(app: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> WebSocket:
    writer.write(handshake("x"))
    await reader.readuntil(b"\r\n\r\n")
    return await app.opened.get()


async def test_received_bytes_count_until_the_message_is_released(app: Application, port: int) -> None:
    async with connected(port) as (reader, writer):
        websocket = await opened_by(app, reader, writer)
        whole = frame(BINARY, bytes(MIB))
        writer.write(whole[: HEAD_BYTES + MIB // 2])
        await until(lambda: app.held == MIB // 2)
        writer.write(whole[HEAD_BYTES + MIB // 2 :])
        message = await websocket.receive()
        assert message is not None
        assert (len(message.data), app.held) == (MIB, MIB)
        message.release()
        writer.write(frame(BINARY, bytes(MIB), fin=False) + frame(CONTINUATION, bytes(100), fin=False))
        await until(lambda: app.held == MIB + 100)
    await websocket.ended()
    assert (app.held, websocket.reason) == (0, CloseReason.LOST)


async def test_a_websocket_ends_if_there_is_no_memory_for_its_message(app: Application, port: int) -> None:
    app.max_bytes = MIB
    async with connected_to(port) as client:
        websocket = await app.opened.get()
        await client.send(bytes(2 * MIB))
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert (client.close_code, client.close_reason) == (1013, "too_many_requests")
        assert websocket.reason is CloseReason.TOO_MANY_REQUESTS
    await websocket.ended()
    assert app.held == 0


async def test_texts_of_every_form_of_length_arrive_in_order(app: Application, port: int) -> None:
    async with connected_to(port) as client:
        websocket = await app.opened.get()
        texts = [f"{size:x<{size}}" for size in (5, 125, 126, 65_535, 65_536)]
        await websocket.send([b"", *(each.encode() for each in texts)])
        assert [await client.recv() for _ in range(6)] == ["", *texts]


async def test_a_message_must_arrive_in_time(app: Application, port: int) -> None:
    app.message_s = app.ping_s = 0.2
    async with connected(port) as (reader, writer):
        websocket = await opened_by(app, reader, writer)
        writer.write(frame(TEXT, b"{", fin=False))
        while websocket.reason is None:
            writer.write(frame(CONTINUATION, b" ", fin=False))
            await asyncio.sleep(0.02)
        assert websocket.reason is CloseReason.SLOW_MESSAGE


async def test_each_message_has_its_own_time(app: Application, port: int) -> None:
    """Each end of a message arrives with the beginning of the next one."""
    app.message_s, app.ping_s = 1.5, 0.6
    async with connected(port) as (reader, writer):
        websocket = await opened_by(app, reader, writer)
        writer.write(frame(TEXT, b"{", fin=False))
        for _ in range(60):
            await asyncio.sleep(0.05)
            writer.write(frame(CONTINUATION, b"}") + frame(TEXT, b"{", fin=False))
            message = await websocket.receive()
            assert message is not None, websocket.reason
            message.release()


async def test_a_websocket_is_idle_when_all_its_messages_are_answered(app: Application, port: int) -> None:
    async with connected(port) as (reader, writer):
        websocket = await opened_by(app, reader, writer)
        writer.write(frame(TEXT, b"1") + frame(TEXT, b"2"))
        first, second = await websocket.receive(), await websocket.receive()
        assert first is not None
        assert second is not None
        first.release()
        assert websocket not in websocket._idle
        second.release()
        assert websocket in websocket._idle


async def test_reading_pauses_while_messages_wait(app: Application, port: int) -> None:
    async with connected_to(port) as client:
        websocket = await app.opened.get()

        async def send_all() -> None:
            for _ in range(64):
                await client.send(bytes(MIB // 2))

        sending = asyncio.create_task(send_all())
        await until(lambda: app.held >= MIB // 2)
        await asyncio.sleep(0.2)
        assert app.held <= 2 * MIB
        assert not sending.done()
        for _ in range(64):
            message = await websocket.receive()
            assert message is not None
            message.release()
        await sending


async def test_a_client_is_found_gone_while_reading_is_paused(app: Application, port: int) -> None:
    client = await connected_to(port)
    websocket = await app.opened.get()
    await client.send(bytes(MIB))
    await until(lambda: app.held == MIB)
    client.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        await websocket.ended()
    assert app.held == 0
    with pytest.raises(ClientClosedRequest):
        await websocket.send([b"{}"])


async def test_a_client_that_pauses_and_then_reads_stays_connected(app: Application, port: int) -> None:
    app.send_s = 0.5
    async with connected(port) as (reader, writer):
        websocket = await opened_by(app, reader, writer)
        await websocket.send([bytes(8 * MIB)])
        assert websocket._connection.flow.write_paused
        await reader.readexactly(10 + 8 * MIB)
        await asyncio.sleep(1.2)  # there is nothing that the client could read
        assert websocket.reason is None


async def test_the_close_of_the_gateway_waits_for_the_client(app: Application, port: int) -> None:
    async with connected_to(port) as client:
        websocket = await app.opened.get()
        await websocket.send([b'"last"'])
        websocket.close(CloseReason.DRAINING)
        assert await client.recv() == '"last"'
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1001
        await websocket.ended()
        assert await websocket.receive() is None


async def test_messages_after_the_stop_are_not_received(app: Application, port: int) -> None:
    async with connected_to(port) as client:
        websocket = await app.opened.get()
        await client.send("1")
        await until(lambda: app.held == 1)
        websocket.stop_receiving()
        assert await websocket.receive() is None
        assert websocket.reason is None


async def test_a_client_that_does_not_answer_the_close_frame_is_not_waited_for_twice(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http1.websocket.CLOSE_S", 0.05)
    monkeypatch.setattr("app.http1.closing.LINGER_S", 2 * PATIENCE_S)
    async with (
        asyncio.timeout(PATIENCE_S),
        listening(app, keep_alive_s=2 * PATIENCE_S) as port,
        connected(port) as (reader, writer),
    ):
        websocket = await opened_by(app, reader, writer)
        websocket.close(CloseReason.DRAINING)
        await websocket.ended()
