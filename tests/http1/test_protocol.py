"""The limits of the HTTP protocol, on a real socket: large heads, slow heads, and input that is not HTTP."""

import asyncio
import socket
import struct

import pytest

from app.http1 import protocol
from app.http1.framing import MAX_HEAD_BYTES
from tests.http1.conftest import Application
from tests.toolkit.listener import connected, problem, request, sent_and_received

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


async def test_a_large_head_of_a_later_request_is_431(port: int) -> None:
    filling = b"x" * (MAX_HEAD_BYTES + 1000)
    answer = await sent_and_received(port, GOOD, b"GET / HTTP/1.1\r\nX: " + filling + b"\r\n\r\n", pause_s=0.05)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"headers_too_large" in answer


async def test_an_endless_head_is_408(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    assert problem(await sent_and_received(port, b"GET / HTTP/1.1\r\nX: ")) == (408, "slow_request")


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


async def test_an_idle_connection_is_closed_without_an_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    assert await sent_and_received(port) == b""


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
