"""A wrong address of Triton is reported with its cause."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.process.serving import announce, wrong_address
from tests.toolkit.triton import FakeTriton, serving


@pytest.fixture
async def http_port() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_the_http_port_of_triton_is_recognized(http_port: int) -> None:
    problem = await wrong_address(f"127.0.0.1:{http_port}")
    assert problem is not None
    assert problem.endswith("the gateway needs Triton's gRPC port, usually 8001, not its HTTP port")


async def test_an_unknown_host_is_reported() -> None:
    assert await wrong_address("triton.invalid:8001") == "the host name 'triton.invalid' is not known"


async def test_a_running_or_starting_triton_is_not_reported() -> None:
    async with serving(FakeTriton()) as triton:
        assert await wrong_address(triton.url) is None
    assert await wrong_address(triton.url) is None
    assert await wrong_address("unix:/run/triton.sock") is None


async def test_a_wrong_address_is_reported_at_once(http_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    class Down:
        is_ready = triton_is_up = False

    announcing = asyncio.create_task(announce(Down(), "http://127.0.0.1:1", f"127.0.0.1:{http_port}"))
    printed = ""
    async with asyncio.timeout(1.5):
        while "an HTTP server answers there" not in printed:
            await asyncio.sleep(0.01)
            printed += capfd.readouterr().err
    announcing.cancel()
