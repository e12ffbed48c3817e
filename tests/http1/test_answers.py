"""Bodies and answers that skip the messages of ASGI, on a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.toolkit.listener import ask, connected, listening, read_answer, request

BODY = b"hello"
LIMIT = 64


class Direct:
    """Answers with the request's body; ``/asgi`` uses ASGI. Records the state of the connection."""

    def __init__(self) -> None:
        self.bodies: list[bytes | None] = []
        self.were_taken: list[bool] = []
        self.after: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        connection = scope["state"]["connection"]
        if scope["path"] in {"/large", "/left"}:
            await self._answer_later(connection, send, wants_disconnect=scope["path"] == "/left")
            return
        taken = None if scope["path"] == "/asgi" else connection.take_body(LIMIT)
        self.bodies.append(taken)
        body = b""
        while taken is None:
            message = await receive()
            body += message["body"]
            taken = None if message["more_body"] else body
        if scope["path"] == "/asgi":
            await self._send(send, taken)
        else:
            await self._answer(connection, send, taken)
            self.after.append((await receive())["type"])

    async def _answer_later(self, connection: Any, send: Any, *, wants_disconnect: bool) -> None:
        while wants_disconnect and not connection.is_lost:
            await asyncio.sleep(0.01)
        await self._answer(connection, send, bytes(8 << 20))

    async def _answer(self, connection: Any, send: Any, body: bytes) -> None:
        was_taken = connection.answer(200, [(b"content-length", b"%d" % len(body))], body)
        self.were_taken.append(was_taken)
        if not was_taken:
            await self._send(send, body)

    @staticmethod
    async def _send(send: Any, body: bytes) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def application() -> Direct:
    return Direct()


@pytest.fixture
async def port(application: Direct) -> AsyncIterator[int]:
    async with listening(application) as port:
        yield port


def post(path: str, *headers: str) -> bytes:
    return request(path, f"Content-Length: {len(BODY)}", *headers, body=BODY)


async def answer_to(port: int, text: bytes) -> tuple[bytes, bytes]:
    async with connected(port) as (reader, writer):
        return await ask(reader, writer, text)


@pytest.mark.parametrize("headers", [(), ("Connection: close",)])
async def test_a_direct_answer_equals_an_answer_through_asgi(port: int, headers: tuple[str, ...]) -> None:
    direct, by_asgi = [await answer_to(port, post(path, *headers)) for path in ("/direct", "/asgi")]
    assert direct == by_asgi
    assert direct[1] == BODY


async def test_connection_close_is_respected(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(post("/direct", "Connection: close"))
        assert (await asyncio.wait_for(reader.read(), 1)).endswith(BODY)


async def test_pipelined_requests_are_answered_in_order(port: int, application: Direct) -> None:
    async with connected(port) as (reader, writer):
        writer.write(post("/direct") + post("/asgi") + post("/direct"))
        assert [(await read_answer(reader))[1] for _ in range(3)] == [BODY] * 3
    assert application.were_taken == [True, True]


async def test_work_after_an_answer_follows_its_write_and_precedes_the_next_request() -> None:
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
            client.send(post("/") * 3)
            async with asyncio.timeout(5):
                while len(events) < 6:
                    await asyncio.sleep(0.01)
    assert events == ["request", b"HTTP/1.1 200"] * 3


async def test_the_application_gets_a_disconnect_after_the_answer(port: int, application: Direct) -> None:
    await answer_to(port, post("/direct"))
    assert application.after == ["http.disconnect"]


async def test_an_incomplete_body_is_not_taken(port: int, application: Direct) -> None:
    async with connected(port) as (reader, writer):
        writer.write(post("/direct")[:-1])
        await asyncio.sleep(0.02)
        assert (await ask(reader, writer, BODY[-1:]))[1] == BODY
    assert application.bodies == [None]


async def test_a_body_above_the_limit_is_not_taken(port: int, application: Direct) -> None:
    large = bytes(LIMIT + 1)
    assert (await answer_to(port, request("/direct", f"Content-Length: {len(large)}", body=large)))[1] == large
    assert application.bodies == [None]


async def test_an_answer_waits_for_a_client_that_does_not_read(port: int, application: Direct) -> None:
    async with connected(port) as (reader, writer):
        writer.write(post("/large") + post("/direct"))
        await asyncio.sleep(0.1)
        assert application.were_taken == [True, False], "8 MiB of the first answer are still unsent"
        assert [len((await read_answer(reader))[1]) for _ in range(2)] == [8 << 20, len(BODY)]


async def test_a_disconnected_client_gets_no_answer(port: int, application: Direct) -> None:
    async with connected(port) as (_reader, writer):
        writer.write(post("/left"))
        await asyncio.sleep(0.02)
    async with asyncio.timeout(2):
        while not application.were_taken:
            await asyncio.sleep(0.01)
    assert application.were_taken == [False]
