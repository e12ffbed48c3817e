"""The load clients count the answers of a server and stop at an unexpected answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.load.__main__ import Worker
from benchmarks.load.http import HttpClient
from benchmarks.load.orders import (
    Drop,
    Flood,
    GrpcAsk,
    Hold,
    HttpAsk,
    Obedient,
    Relay,
    SocketAsk,
    TensorAsk,
    Unary,
    UnexpectedAnswer,
)
from benchmarks.servers import load_process
from benchmarks.workers import ASK as ASK_OF_A_WORKER
from benchmarks.workers import gateway

ASK = HttpAsk("/", b"{}", event=b"event: output", end=b"event: done")
SOCKET = SocketAsk("/", b"{}", last=b'"event":"done"')
CALL = GrpcAsk("identity", (TensorAsk("X", "FP32", (1,), b"\0" * 4),))

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def http_server(answer: Answer) -> AsyncIterator[int]:
    """Yields the port of a server for requests with the body of ``ASK``."""
    handlers: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(cast("asyncio.Task[None]", asyncio.current_task()))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n{}"):
                await answer(writer)
        writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait(handlers, timeout=5)


async def in_two_parts(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
    await writer.drain()
    await asyncio.sleep(0.001)
    writer.write(b"cd")


async def not_found(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


async def two_events(writer: asyncio.StreamWriter) -> None:
    for part in (b"HTTP/1.1 200 OK\r\n\r\nevent: out", b"put\n\nevent: output\n\n", b"event: done"):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.001)


async def test_http_client_counts_whole_answers() -> None:
    async with http_server(in_two_parts) as port:
        report = await HttpClient("127.0.0.1", port).unary([ASK] * 2, seconds=0.03)
    assert report.count == len(report.durations) >= 2
    assert report.elapsed_s >= 0.03


async def test_each_websocket_sends_its_next_message_after_the_last_event() -> None:
    async def answer(connection: ServerConnection) -> None:
        async for message in connection:
            assert message == "{}"
            for event in ("output", "done"):
                await connection.send(f'{{"event":"{event}"}}')

    async with serve(answer, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        report = await HttpClient("127.0.0.1", port).unary([SOCKET] * 2, seconds=0.03)
    assert report.count == len(report.durations) >= 2


async def test_events_are_counted_across_chunks() -> None:
    async with http_server(two_events) as port:
        assert (await Worker(HttpClient("127.0.0.1", port)).perform(Relay((ASK,), 0.001))).count == 2


async def test_a_load_process_holds_streams_until_they_are_dropped(tmp_path: Path) -> None:
    opened: list[asyncio.StreamWriter] = []

    async def begin(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        opened.append(writer)

    async with http_server(begin) as port, load_process("http", f"127.0.0.1:{port}", tmp_path) as load:
        assert (await load.perform(Hold(ASK, streams=3))).count == 3
        assert (await load.perform(Hold(ASK, streams=1))).count == 4
        assert not any(each.transport.is_closing() for each in opened)
        assert (await load.perform(Drop())).count == 0


async def test_a_load_process_raises_the_exception_of_its_load(tmp_path: Path) -> None:
    async with http_server(not_found) as port, load_process("http", f"127.0.0.1:{port}", tmp_path) as load:
        with pytest.raises(UnexpectedAnswer, match="404"):
            await load.perform(Unary((ASK,), seconds=5))


async def refused(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 60\r\nContent-Length: 0\r\n\r\n")


async def test_a_flood_sends_at_a_steady_rate() -> None:
    async with http_server(in_two_parts) as port:
        client = HttpClient("127.0.0.1", port)
        answers = await client.above_capacity(Flood(ASK, rate=200, warm_up_s=0.0, seconds=0.2))
    assert 1 < answers.asked <= 40
    assert len(answers.good_s) == answers.statuses[200] > 0


@pytest.mark.parametrize("obeys", [True, False])
async def test_an_obedient_caller_waits_for_retry_after(obeys: bool) -> None:
    order = Obedient(ASK, callers=2, pause_s=0.01, warm_up_s=0.0, seconds=0.2, obeys=obeys)
    async with http_server(refused) as port:
        answers = await HttpClient("127.0.0.1", port).above_capacity(order)
    assert answers.statuses == {429: len(answers.refused_s)}
    assert (answers.asked == 2) == obeys


async def test_two_workers_with_an_instant_engine_answer(tmp_path: Path) -> None:
    """The gateway of the workers' benchmark answers without Triton."""
    async with gateway("instant", None, tmp_path, workers="2") as peer:
        report = await peer.load.perform(Unary((ASK_OF_A_WORKER,) * 2, seconds=0.1))
    assert report.count
