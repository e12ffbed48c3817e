"""The end of a connection on a real socket, and the limit of connections."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from app.http1 import closing, protocol
from app.http1.closing import LazyEvent
from tests.http1.conftest import Application
from tests.toolkit.listener import ask, connected, listening, problem, read_answer, request, sent_and_received

EARLY = request("/early", "Content-Length: 100000000")
GOOD = request("/early", method="GET")
MIB = 1 << 20


async def test_nothing_is_parsed_after_the_last_answer(port: int, application: Application) -> None:
    answer = await sent_and_received(port, request("/early", "Content-Length: 5"), b"hello" + GOOD, pause_s=0.05)
    assert answer.count(b"HTTP/1.1") == 1
    assert application.calls == 1


@pytest.mark.parametrize("size", [0, 4 * MIB, 100 * MIB])
async def test_an_answer_to_an_incomplete_request_closes_and_can_be_read_after_more_of_it(port: int, size: int) -> None:
    """Firefox sends the whole body before it reads."""
    async with connected(port) as (reader, writer):
        writer.write(EARLY)
        await asyncio.sleep(0.05)
        writer.write(bytes(size))
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 1)
        assert (b"connection: close" in answer, answer.endswith(b"hello")) == (True, True)


async def test_a_long_upload_can_read_its_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "LINGER_S", 1.0)
    async with connected(port) as (reader, writer):
        writer.write(EARLY)
        for _ in range(8):
            await asyncio.sleep(0.25)
            writer.write(bytes(closing.LINGER_STEP_BYTES))
            await writer.drain()
        assert (await reader.read()).endswith(b"hello")


@pytest.mark.parametrize(
    ("text", "part", "longest_s"),
    [
        (EARLY, bytes(closing.LINGER_STEP_BYTES), 0.5),
        (EARLY, b"x", closing.MAX_LINGER_S),
        (b"nonsense\r\n\r\n", b"x", closing.MAX_LINGER_S),
    ],
    ids=["for too long", "slowly", "slowly after an invalid request"],
)
async def test_a_client_that_goes_on_to_send_is_disconnected(
    port: int, monkeypatch: pytest.MonkeyPatch, text: bytes, part: bytes, longest_s: float
) -> None:
    monkeypatch.setattr(closing, "LINGER_S", 0.2)
    monkeypatch.setattr(closing, "MAX_LINGER_S", longest_s)
    async with asyncio.timeout(5), connected(port) as (_reader, writer):
        writer.write(text)
        with pytest.raises(ConnectionError):
            await _send(writer, part)


async def _send(writer: asyncio.StreamWriter, part: bytes) -> None:
    while True:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)


def in_a_long_turn(send: Callable[[], object]) -> None:
    """Sends during a turn of the event loop that reads for longer than the timeouts."""
    loop, (readable, other) = asyncio.get_running_loop(), socket.socketpair()

    def read() -> None:
        loop.remove_reader(readable)
        readable.close()
        other.close()
        time.sleep(0.1)
        send()
        time.sleep(0.1)

    loop.add_reader(readable, read)
    other.send(b"x")


@pytest.mark.parametrize(
    ("before", "sent"),
    [(0, 0), (0, 10), (1, 0)],
    ids=["new", "in a head", "idle"],
)
async def test_a_request_that_arrives_during_a_long_turn_of_the_event_loop_is_answered(
    monkeypatch: pytest.MonkeyPatch, before: int, sent: int
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    async with listening(Application(), keep_alive_s=0.1) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(before):
                client.sendall(GOOD)
                assert (await asyncio.to_thread(client.recv, 1000)).startswith(b"HTTP/1.1 200")
            client.sendall(GOOD[:sent])
            await asyncio.sleep(0.02)
            in_a_long_turn(lambda: client.sendall(GOOD[sent:]))
            assert (await asyncio.to_thread(client.recv, 1000)).startswith(b"HTTP/1.1 200")


async def test_a_client_that_sends_without_end_is_disconnected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "MAX_LINGER_BYTES", 8 * MIB)
    sent = 0
    async with connected(port) as (_reader, writer):
        writer.write(EARLY)
        with suppress(ConnectionError):
            while sent < 100 * MIB:
                writer.write(bytes(MIB))
                await writer.drain()
                sent += MIB
    assert sent < (8 + 24) * MIB, "the gateway read more than MAX_LINGER_BYTES and the socket buffers"


@pytest.mark.parametrize("every_s", [0.05, 10])
async def test_empty_lines_do_not_keep_a_connection_open(
    port: int, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)

    async def send_empty_lines(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"\r\n")
            await asyncio.sleep(every_s)

    async with connected(port) as (reader, writer):
        await ask(reader, writer, GOOD)
        sending = asyncio.create_task(send_empty_lines(writer))
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 2) == b""
        sending.cancel()


async def test_an_idle_connection_is_closed(application: Application) -> None:
    async with listening(application, keep_alive_s=0.1) as port, connected(port) as (reader, writer):
        await ask(reader, writer, GOOD)
        assert await asyncio.wait_for(reader.read(), 3) == b""


@pytest.mark.parametrize("close", [(), ("Connection: close",)])
async def test_a_client_that_does_not_read_is_disconnected(application: Application, close: tuple[str, ...]) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with listening(application, keep_alive_s=0.2) as port:
            client.connect(("127.0.0.1", port))
            client.sendall(request("/large", *close, method="GET"))
            await asyncio.sleep(0.7)
            client.settimeout(5)
            received = await asyncio.to_thread(_read_all, client)
    assert received < 32 * MIB


async def test_a_client_that_pauses_and_then_reads_gets_the_whole_answer() -> None:
    async def with_a_late_end(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(8 * MIB), "more_body": True})
        await asyncio.sleep(1.2)
        await send({"type": "http.response.body", "body": b"end"})

    async with listening(with_a_late_end, keep_alive_s=0.5) as port, connected(port) as (reader, writer):
        writer.write(request("/", method="GET"))
        assert (await reader.read()).endswith(b"3\r\nend\r\n0\r\n\r\n")


def _read_all(client: socket.socket) -> int:
    size = 0
    with suppress(ConnectionResetError):
        while chunk := client.recv(MIB):
            size += len(chunk)
    return size


async def test_connections_above_the_limit_are_429(application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SHORTEST_IDLE_S", 60)
    refused: list[None] = []
    async with listening(application, max_connections=2, on_refused=lambda: refused.append(None)) as port:
        async with connected(port) as (reader, writer), connected(port) as (others_reader, others_writer):
            await ask(reader, writer, GOOD)
            others_writer.write(GOOD)
            await read_answer(others_reader)
            for _ in range(3):
                answer = await asyncio.wait_for(sent_and_received(port, GOOD), 1)
                assert problem(answer) == (429, "too_many_requests")
                assert b"retry-after: 1\r\n" in answer
            others_writer.write(GOOD)
            assert (await read_answer(others_reader))[1] == b"hello"
        await asyncio.sleep(0.05)
        async with connected(port) as (reader, writer):
            assert (await ask(reader, writer, GOOD))[1] == b"hello"
    assert len(refused) == 3


class TestFullGateway:
    """``max_connections`` connections are open."""

    @pytest.fixture(autouse=True)
    def any_idle_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(protocol, "SHORTEST_IDLE_S", 0)

    async def test_a_new_connection_closes_the_longest_idle_one(self, application: Application) -> None:
        async with (
            listening(application, max_connections=2) as port,
            connected(port) as first,
            connected(port) as second,
        ):
            for reader, writer in (first, second, first):
                await ask(reader, writer, GOOD)
            async with connected(port) as (reader, writer):
                assert (await ask(reader, writer, GOOD))[1] == b"hello"
                assert await asyncio.wait_for(second[0].read(), 1) == b""
                first[1].write(GOOD)
                assert (await read_answer(first[0]))[1] == b"hello"

    async def test_new_connections_replace_any_number_of_idle_ones(self, application: Application) -> None:
        refused: list[None] = []
        async with (
            listening(application, max_connections=4, on_refused=lambda: refused.append(None)) as port,
            AsyncExitStack() as stack,
        ):
            for _ in range(3):
                opened = [stack.enter_async_context(connected(port)) for _ in range(4)]
                for reader, writer in await asyncio.gather(*opened):
                    assert (await ask(reader, writer, GOOD))[1] == b"hello"
        assert not refused

    async def test_a_connection_with_a_request_is_not_closed(self, application: Application) -> None:
        async with listening(application, max_connections=1) as port, connected(port) as (reader, writer):
            await ask(reader, writer, GOOD)
            writer.write(request("/stream", method="GET"))
            await reader.readuntil(b"one")
            assert problem(await sent_and_received(port, GOOD)) == (429, "too_many_requests")
            application.go_on.set()
            await reader.readuntil(b"two")

    async def test_a_connection_is_not_closed_before_its_answer_is_read(self, application: Application) -> None:
        async with listening(application, max_connections=1) as port:
            with socket.socket() as client:
                client.connect(("127.0.0.1", port))
                client.sendall(request("/large", method="GET"))
                await asyncio.sleep(0.2)
                assert problem(await sent_and_received(port, GOOD)) == (429, "too_many_requests")
                client.setblocking(False)
                async with asyncio.timeout(10):
                    while application.connection.unsent_bytes:
                        await asyncio.get_running_loop().sock_recv(client, MIB)
                async with connected(port) as (reader, writer):
                    assert (await ask(reader, writer, GOOD))[1] == b"hello"

    async def test_a_connection_whose_request_has_arrived_is_not_closed(self, application: Application) -> None:
        async with listening(application, max_connections=1) as port, connected(port) as (reader, writer):
            await ask(reader, writer, GOOD)
            writer.write(GOOD)  # in the socket buffer; the event loop has not read it yet
            assert not application.connection.close_if_idle()
            assert (await read_answer(reader))[1] == b"hello"


class TestShutdown:
    @pytest.mark.parametrize("end", ["close_after_answer", "shutdown"])
    @pytest.mark.parametrize(
        ("text", "received"),
        [
            (GOOD, len(GOOD)),
            (GOOD, 10),
            (request("/read", "Content-Length: 5", body=b"hello"), -3),
        ],
        ids=["in the socket buffer", "a part of its head", "a part of its body"],
    )
    async def test_the_answer_to_a_request_under_way_is_the_last(
        self, port: int, application: Application, text: bytes, received: int, end: str
    ) -> None:
        async with connected(port) as (reader, writer):
            assert b"connection: close" not in (await ask(reader, writer, GOOD))[0]
            writer.write(text[:received])
            if text[received:]:
                await asyncio.sleep(0.02)  # otherwise the event loop has not read it yet
            getattr(application.connection, end)()
            head, body = await ask(reader, writer, text[received:])
            assert (b"connection: close" in head, b"hello" in body) == (True, True)
            assert await asyncio.wait_for(reader.read(), 1) == b""

    async def test_a_started_keep_alive_answer_is_followed_by_another(
        self, port: int, application: Application
    ) -> None:
        """Its head has no ``Connection: close``, so the client may send its next request on the connection."""
        async with connected(port) as (reader, writer):
            writer.write(request("/stream", method="GET"))
            await reader.readuntil(b"one\r\n")
            application.connection.close_after_answer()
            application.go_on.set()
            await reader.readuntil(b"0\r\n\r\n")
            assert b"connection: close" in (await ask(reader, writer, GOOD))[0]

    async def test_an_idle_connection_is_closed_at_once(self, port: int, application: Application) -> None:
        async with connected(port) as (reader, writer):
            await ask(reader, writer, GOOD)
            application.connection.shutdown()
            assert await asyncio.wait_for(reader.read(), 1) == b""

    async def test_a_lingering_connection_is_closed_at_once(self, port: int, application: Application) -> None:
        async with connected(port) as (reader, writer):
            await ask(reader, writer, EARLY)
            assert not application.connection.transport.is_closing()
            application.connection.shutdown()
            assert application.connection.transport.is_closing()


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
async def test_a_client_that_closes_its_side_gets_its_answer(
    port: int, application: Application, pause_s: float
) -> None:
    async with connected(port) as (reader, writer):
        writer.write(request("/later", "Content-Length: 5", body=b"hello"))
        await asyncio.sleep(pause_s)
        writer.write_eof()
        assert await asyncio.wait_for(reader.readexactly(len(INTERIM)), 2) == INTERIM
        await asyncio.sleep(0.1)
        application.go_on.set()
        head, body = await read_answer(reader)
        assert (b"connection: close" in head, body) == (True, b"hello")
        assert await asyncio.wait_for(reader.read(), 2) == b""


async def test_a_second_request_before_the_end_of_the_data_is_answered(port: int) -> None:
    async with connected(port) as (reader, writer):
        await ask(reader, writer, request("/early", method="GET"))
        writer.write(request("/early", method="GET"))
        writer.write_eof()
        assert (await asyncio.wait_for(reader.read(), 2)).endswith(b"hello")


async def test_the_wait_for_an_answer_to_a_half_closed_connection_is_limited(
    port: int, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "HALF_CLOSED_S", 0.1)
    async with connected(port) as (_reader, writer):
        writer.write(request("/wait", "Content-Length: 0"))
        writer.write_eof()
        await asyncio.wait_for(application.disconnected.wait(), 2)


async def test_an_answer_that_has_begun_is_not_limited(
    port: int, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "HALF_CLOSED_S", 0.5)
    async with connected(port) as (reader, writer):
        writer.write(request("/later_stream", "Content-Length: 0"))
        writer.write_eof()
        await reader.readexactly(len(INTERIM))
        application.go_on.set()
        await reader.readuntil(b"one")
        await asyncio.sleep(0.8)
        application.go_on.set()
        assert b"two" in await asyncio.wait_for(reader.read(), 2)


@pytest.mark.parametrize(
    "text",
    [
        request("/read", "Content-Length: 5", body=b"hel"),
        b"POST /wait HTTP/1.0\r\nContent-Length: 0\r\n\r\n",
        request("/wait", "Content-Length: 0") + request("/early", "Content-Length: 0"),
    ],
    ids=["a part of a request", "HTTP/1.0", "two requests"],
)
async def test_other_ends_of_the_data_are_disconnects(port: int, application: Application, text: bytes) -> None:
    async with connected(port) as (reader, writer):
        writer.write(text)
        await asyncio.sleep(0.05)
        writer.write_eof()
        await asyncio.wait_for(application.disconnected.wait(), 2)
        assert await asyncio.wait_for(reader.read(), 2) == b""


async def test_an_event_wakes_all_waiters_that_are_not_cancelled() -> None:
    event = LazyEvent(is_set=False)
    for _ in range(2):
        first, *others = [asyncio.create_task(event.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        event.set()
        event.clear()
        assert await asyncio.gather(*others) == [True, True]
