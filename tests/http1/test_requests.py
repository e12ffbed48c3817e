"""Requests and answers on a real socket: heads and their limits, upgrades, framing, trailers and pipelining."""

import asyncio
import gc
import json
import random
import socket
import struct
import zlib
from typing import Any

import pytest

from app.http1 import closing, protocol
from app.http1.framing import CHUNKS_AT_ONCE, MAX_FRAMING_BYTES
from app.http1.protocol import MAX_AHEAD_BYTES, MAX_HEAD_BYTES
from tests.http1.conftest import LIMIT, Application
from tests.toolkit.listener import ask, connected, listening, problem, read_answer, request, sent_and_received
from tests.toolkit.waiting import until

CHUNKED = "Transfer-Encoding: chunked"
CLOSE = "Connection: close"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AA==")
FRAMED = {"Content-Length: 5": b"hello", CHUNKED: b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"}


def hello(path: str, *headers: str) -> bytes:
    return request(path, "Content-Length: 5", *headers, body=b"hello")


def received(body: bytes) -> tuple[dict[str, str], str]:
    """Returns the headers and the body that the application received."""
    found: dict[str, Any] = json.loads(body)
    return found["headers"], found["body"]


@pytest.mark.parametrize("framing", FRAMED)
@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET, ("Connection: Upgrade", "Upgrade: h2c", "Expect: 100-continue")])
@pytest.mark.parametrize("pieces", ["one", "two", "in the empty line", "bytes"])
async def test_upgrade_is_ignored_and_the_body_is_read(
    port: int, caplog: pytest.LogCaptureFixture, framing: str, upgrade: tuple[str, ...], pieces: str
) -> None:
    head, body = request("/read", *upgrade, framing), FRAMED[framing]
    sent = {
        "one": [head + body],
        "two": [head, body],
        "in the empty line": [head[:-1], head[-1:] + body],
        "bytes": [bytes([byte]) for byte in head + body],
    }[pieces]
    async with connected(port) as (reader, writer):
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0 if pieces == "bytes" else 0.01)
        if "Expect: 100-continue" in upgrade:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        head, answer = await read_answer(reader)
        assert head.startswith(b"http/1.1 200 ")
        assert received(answer)[1] == "hello"
        assert (await ask(reader, writer, request("/early", method="GET")))[1] == b"hello"
    assert not caplog.records


async def test_a_body_of_many_chunks_and_a_pipelined_request(port: int) -> None:
    text = b"x" * 5 * CHUNKS_AT_ONCE
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    async with connected(port) as (reader, writer):
        writer.write(request("/read", CHUNKED, body=body) + request("/early", method="GET"))
        assert received((await read_answer(reader))[1])[1] == text.decode()
        assert (await read_answer(reader))[1] == b"hello"


class TestPassedBody:
    """A large body is written directly to the sink of the application."""

    BODY = random.Random(7).randbytes(3_000_000).replace(b"!", b"?")
    SEEN = b"3000000 %d" % zlib.crc32(BODY)

    @pytest.mark.parametrize("framing", ["length", "chunked"])
    @pytest.mark.parametrize("is_pipelined", [True, False])
    async def test_the_body_is_complete_and_the_connection_stays_open(
        self, port: int, framing: str, is_pipelined: bool
    ) -> None:
        sent = self.BODY if framing == "length" else b"2DC6C0\r\n" + self.BODY + b"\r\n0\r\n\r\n"
        header = f"Content-Length: {len(self.BODY)}" if framing == "length" else CHUNKED
        async with connected(port) as (reader, writer):
            for _ in range(2):
                following = request("/early", method="GET")
                writer.write(request("/sink", header, body=sent) + following * is_pipelined)
                assert (await read_answer(reader))[1] == self.SEEN
                assert (await ask(reader, writer, following * (not is_pipelined)))[1] == b"hello"

    @pytest.mark.parametrize("content", [b"x", b"!"])
    async def test_an_idle_connection_does_not_keep_its_memory(
        self, port: int, application: Application, content: bytes
    ) -> None:
        async with connected(port) as (reader, writer):
            await ask(reader, writer, request("/sink", "Content-Length: 3000000", body=content * 3_000_000))
            await asyncio.sleep(0.05)
            gc.collect()
            assert application.last_sink is not None
            assert application.last_sink() is None

    async def test_the_body_may_follow_100_continue(self, port: int) -> None:
        async with connected(port) as (reader, writer):
            writer.write(request("/sink", "Content-Length: 200000", "Expect: 100-continue"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert (await ask(reader, writer, b"x" * 200_000))[1].startswith(b"200000 ")

    @pytest.mark.parametrize(("length", "is_half_closed"), [(120_000, False), (200_000, False), (200_000, True)])
    async def test_a_disconnect_within_the_body_is_reported(
        self, port: int, application: Application, length: int, *, is_half_closed: bool
    ) -> None:
        async with connected(port) as (reader, writer):
            writer.write(request("/sink", f"Content-Length: {length}", body=b"x" * 100_000))
            await asyncio.sleep(0.05)
            if is_half_closed:
                writer.write_eof()
                assert await reader.read() == b""
        async with asyncio.timeout(5):
            await application.disconnected.wait()

    @pytest.mark.parametrize("framing", ["Content-Length: 3000000", CHUNKED])
    async def test_a_rejected_body_is_not_read_to_its_end(self, port: int, framing: str) -> None:
        begin = b"2DC6C0\r\n" if framing == CHUNKED else b""
        async with connected(port) as (reader, writer):
            writer.write(request("/sink", framing, body=begin + b"x" * 100_000))
            await asyncio.sleep(0.05)
            head, answer = await ask(reader, writer, b"!" * 100_000)
            assert answer == b"That is too much."
            assert b"connection: close" in head


async def test_trailers_are_not_merged_into_the_headers(port: int) -> None:
    async with connected(port) as (reader, writer):
        trailers = b"Content-Type: text/html\r\nX-Request-ID: mine\r\nHost: y\r\n"
        writer.write(request("/read", CHUNKED, body=b"5\r\nhello\r\n0\r\n" + trailers + b"\r\n"))
        headers, body = received((await read_answer(reader))[1])
        assert (headers, body) == ({"host": "x", "transfer-encoding": "chunked"}, "hello")
        assert (await ask(reader, writer, request("/early", method="GET")))[1] == b"hello"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"0\r\n" + b"a:b\r\n" * MAX_FRAMING_BYTES, 431, "headers_too_large"),
        (b"0\r\na:" + b"b" * 2 * MAX_FRAMING_BYTES, 431, "headers_too_large"),
        (b"5\r\nhelloo\r\n", 400, "invalid_request"),
    ],
    ids=["endless trailers", "an endless trailer", "a malformed chunk"],
)
async def test_invalid_framing_before_the_answer_is_an_error(
    port: int, application: Application, body: bytes, status: int, code: str
) -> None:
    assert problem(await sent_and_received(port, request("/read", CHUNKED, body=body))) == (status, code)
    assert application.disconnected.is_set()


async def test_endless_trailers_after_the_answer_are_ignored(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "LINGER_S", 0.2)
    answer = await sent_and_received(
        port, request("/early", CHUNKED), b"0\r\n" + b"a:b\r\n" * MAX_FRAMING_BYTES, pause_s=0.05
    )
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize(
    "text",
    [
        b"GET /early HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
        b"GET /early\r\n\r\n",
        b"\x16\x03\x01\x02\0\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /early HTTP/1.1\nHost: x\n\n",
        b"GET /early HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /early HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
        b"GET /early HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
        b"GET /early HTTP/1.1\r\nHost: x\r\nA: b\rc\r\n\r\n",
        request("/early", "Transfer-Encoding:\x0bchunked", body=b"0\r\n\r\n"),
        request("/early", "Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
        request("/early", CHUNKED, "Content-Length: 5", body=b"0\r\n\r\n"),
        request("/early", "Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"),
        request("/early", "Content-Length: 5", "Content-Length: 6", body=b"hello"),
        request("/early", "Content-Length: 5, 5", body=b"hello"),
        request("/early", "Content-Length: 0x5", body=b"hello"),
        request("/early", "Content-Length: 99999999999999999999", body=b"hello"),
        request("/early", CHUNKED, body=b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
)
async def test_ambiguous_requests_are_400(port: int, application: Application, text: bytes) -> None:
    assert problem(await sent_and_received(port, text + request("/early"))) == (400, "invalid_request")
    assert not application.calls


async def test_https_at_the_port_of_http_is_explained(port: int) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(32, 64))
    assert b"write http:// instead of https://" in await sent_and_received(port, hello)


async def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    first = request("/read", "X-Number: 1", "Content-Length: 3", body=b"one")
    second = request("/read", "X-Number: 2", CHUNKED, body=b"3\r\ntwo\r\n0\r\n\r\n")
    async with connected(port) as (reader, writer):
        writer.write(first + second + b"\r\n" + first + request("/early", CLOSE) + second)
        for number, text in (("1", "one"), ("2", "two"), ("1", "one")):
            headers, body = received((await read_answer(reader))[1])
            assert (headers["x-number"], body) == (number, text)
        head, body = await read_answer(reader)
        assert (b"connection: close" in head, body, await reader.read()) == (True, b"hello", b"")


@pytest.mark.parametrize(
    ("second", "then"),
    [
        (request("/early", method="GET"), b"HTTP/1.1 200 "),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000, b"HTTP/1.1 431 "),
        (request("/early", CHUNKED, body=b"x" * 4 * MAX_AHEAD_BYTES), b"HTTP/1.1 431 "),
    ],
)
async def test_a_pipelined_request_waits_for_the_running_answer(
    port: int, application: Application, second: bytes, then: bytes
) -> None:
    async with connected(port) as (reader, writer):
        writer.write(request("/stream", method="GET"))
        assert (await reader.readuntil(b"one\r\n")).endswith(b"\r\n\r\n3\r\none\r\n")
        writer.write(second)
        await asyncio.sleep(0.05)
        application.go_on.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"
        assert (await reader.readline()).startswith(then)


@pytest.mark.parametrize("refused", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000])
async def test_an_invalid_request_does_not_lose_the_answer_before_it(port: int, refused: bytes) -> None:
    answers = await sent_and_received(port, request("/early", method="GET") + refused)
    first, _, second = answers.partition(b"hello")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))


async def test_a_shutdown_does_not_lose_an_unsent_answer() -> None:
    async def answer_and_shut_down(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})
        scope["state"]["connection"].shutdown()

    async with listening(answer_and_shut_down) as port:
        assert (await sent_and_received(port, request("/", method="GET"))).endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize("rest", [b"nonsense\r\n", b"0\r\n\r\n"], ids=["malformed", "complete"])
async def test_the_rest_of_a_body_does_not_change_a_running_answer(
    port: int, application: Application, rest: bytes
) -> None:
    async with connected(port) as (reader, writer):
        writer.write(request("/stream", CHUNKED))
        assert b"connection: close" in await reader.readuntil(b"one\r\n")
        writer.write(rest + request("/early"))
        await asyncio.sleep(0.05)
        application.go_on.set()
        assert await reader.read() == b"3\r\ntwo\r\n0\r\n\r\n"
    assert application.calls == 1


@pytest.mark.parametrize("ahead", [0, 10, 2 * MAX_AHEAD_BYTES])
async def test_a_disconnect_after_pipelined_data_is_reported(
    port: int, application: Application, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(closing, "DISCONNECT_CHECK_S", 0.05)
    async with connected(port) as (_reader, writer):
        writer.write(request("/wait", method="GET") + b"x" * ahead)
        await writer.drain()
        await asyncio.sleep(0.1)
        assert not application.disconnected.is_set()
        writer.close()
        await asyncio.wait_for(application.disconnected.wait(), 5)


MAX_SHARED_ATTRIBUTES = 30
"""An object with more attributes would get its own dictionary in CPython, which needs more than 1 KiB."""
GOOD = b"GET /early HTTP/1.1\r\nHost: x\r\n\r\n"


def segments_received(connection: socket.socket) -> int:
    """Returns the number of received TCP segments with data (Linux, ``struct tcp_info``, ``tcpi_data_segs_in``)."""
    (count,) = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 152)
    return int(count)


async def test_head_and_body_of_an_answer_leave_in_one_segment(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(GOOD)
        await reader.readuntil(b"hello")
        assert segments_received(writer.get_extra_info("socket")) == 1


async def test_an_answer_without_a_body_is_sent_at_once(port: int, application: Application) -> None:
    async with connected(port) as (reader, writer):
        writer.write(request("/stream", method="GET"))
        await reader.readuntil(b"one")
        application.go_on.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(request("/early", method="HEAD"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize("where", ["header", "headers", "line"])
async def test_a_large_head_is_431(port: int, where: str, in_one_piece: bool) -> None:
    filling = b"x" * (MAX_HEAD_BYTES + 1000)
    head = {
        "header": b"GET / HTTP/1.1\r\nX: " + filling,
        "headers": b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % number for number in range(3000)) + b"Z: z",
        "line": b"GET /" + filling + b" HTTP/1.1\r\nX: y",
    }[where]
    chunks = [head + b"\r\n\r\n"] if in_one_piece else [head[i : i + 4000] for i in range(0, MAX_HEAD_BYTES + 1, 4000)]
    assert problem(await sent_and_received(port, *chunks, pause_s=0.01)) == (431, "headers_too_large")


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([b"GET / HTTP/1.1\r\nX: "], (408, "slow_request")),
        ([GOOD, b"GET /early"], (408, "slow_request")),
        ([], None),
    ],
    ids=["an endless head", "an endless second head", "nothing"],
)
async def test_an_endless_head_is_408_and_an_idle_connection_closes_without_an_answer(
    port: int, monkeypatch: pytest.MonkeyPatch, sent: list[bytes], expected: tuple[int, str] | None
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    answer = (await sent_and_received(port, *sent, pause_s=0.02)).rpartition(b"hello")[2]
    assert (problem(answer) if answer else None) == expected


async def test_the_head_timeout_does_not_apply_to_the_answer(
    port: int, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    text = request("/stream")
    async with connected(port) as (reader, writer):
        writer.write(text[:10])
        await asyncio.sleep(0.02)
        writer.write(text[10:])
        await reader.readuntil(b"one")
        await asyncio.sleep(0.2)
        application.go_on.set()
        assert b"408" not in await reader.readuntil(b"two")


async def test_a_connection_uses_little_memory_during_an_answer(port: int, application: Application) -> None:
    async with connected(port) as (reader, writer):
        writer.write(request("/stream"))
        await reader.readuntil(b"one")
        assert application.connection.parser is None
        assert len(vars(application.connection)) <= MAX_SHARED_ATTRIBUTES
        application.go_on.set()
        await reader.readuntil(b"two")
        writer.write(GOOD)
        await reader.readuntil(b"hello")


class TestDirectAnswers:
    """Bodies and answers that skip the messages of ASGI."""

    async def test_they_equal_those_through_asgi(self, port: int) -> None:
        """With and without ``Connection: close``, which is respected."""
        async with asyncio.timeout(2):  # less than the time of the keep-alive
            direct, by_asgi = [
                await sent_and_received(port, hello(path), hello(path, CLOSE), pause_s=0.02)
                for path in ("/direct", "/asgi")
            ]
        assert direct == by_asgi
        assert (direct.count(b"\r\n\r\nhello"), direct.count(b"connection: close")) == (2, 1)

    async def test_pipelined_requests_are_answered_in_order_and_followed_by_a_disconnect(
        self, port: int, application: Application
    ) -> None:
        async with connected(port) as (reader, writer):
            writer.write(hello("/direct") + hello("/asgi") + hello("/direct"))
            assert [(await read_answer(reader))[1] for _ in range(3)] == [b"hello"] * 3
        assert application.were_direct == [True, True]
        assert application.taken == [b"hello"] * 2
        assert application.after_answer == ["http.disconnect"] * 2

    async def test_work_after_an_answer_follows_its_write_and_precedes_the_next_request(self) -> None:
        events: list[object] = []
        client = socket.socket()

        async def application(scope: Any, _receive: Any, _send: Any) -> None:
            events.append("request")
            connection = scope["state"]["connection"]
            connection.take_body(LIMIT)
            assert connection.answer(200, [(b"content-length", b"0")], b"")
            connection.loop.call_soon(lambda: events.append(client.recv(4096)[:12]))

        with client:
            async with listening(application) as port:
                client.connect(("127.0.0.1", port))
                client.setblocking(False)
                client.send(hello("/") * 3)
                await until(lambda: len(events) == 6)
        assert events == ["request", b"HTTP/1.1 200"] * 3

    @pytest.mark.parametrize(("size", "first"), [(5, 4), (LIMIT + 1, LIMIT + 1)], ids=["incomplete", "too large"])
    async def test_such_a_body_is_not_taken(self, port: int, application: Application, size: int, first: int) -> None:
        text, rest = request("/direct", f"Content-Length: {size}", body=bytes(first)), bytes(size - first)
        async with connected(port) as (reader, writer):
            writer.write(text)
            await asyncio.sleep(0.02)
            assert (await ask(reader, writer, rest))[1] == bytes(size)
        assert application.taken == [None]

    async def test_an_answer_waits_for_a_client_that_does_not_read(self, port: int, application: Application) -> None:
        async with connected(port) as (reader, writer):
            writer.write(hello("/large_direct") + hello("/direct"))
            await asyncio.sleep(0.1)
            assert application.were_direct == [True, False], "8 MiB of the first answer are still unsent"
            assert [len((await read_answer(reader))[1]) for _ in range(2)] == [8 << 20, 5]

    async def test_a_disconnected_client_gets_no_answer(self, port: int, application: Application) -> None:
        async with connected(port) as (_reader, writer):
            writer.write(hello("/lost_direct"))
            await asyncio.sleep(0.02)
        await until(lambda: application.were_direct)
        assert application.were_direct == [False]
