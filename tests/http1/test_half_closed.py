"""Clients that close their side of the connection after a request, and clients that close the whole connection."""

import asyncio

import pytest

from app.http1 import closing
from tests.http1.conftest import Application
from tests.toolkit.listener import ask, connected, read_answer, request

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


async def test_a_client_that_closes_the_connection_is_noticed(port: int, application: Application) -> None:
    async with connected(port) as (_reader, writer):
        writer.write(request("/wait", "Content-Length: 0"))
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.wait_for(application.disconnected.wait(), 1)


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
