"""An ASGI application behind the gateway's HTTP protocol, on a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from app.api.error_table import problem_response
from app.http1.protocol import ConnectionLimit, HttpConnection
from tests.toolkit.waiting import PATIENCE_S


@asynccontextmanager
async def listening(
    app: Any, *, max_connections: int = 64, on_refused: Callable[[], object] = lambda: None, keep_alive_s: float = 5
) -> AsyncIterator[int]:
    """Yields the port. The protocol is wired as uvicorn's server does it, without its pauses at start and end."""
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=keep_alive_s
    )
    config.load()
    state, limit = ServerState(), ConnectionLimit(max_connections, on_refused, problem_response)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: HttpConnection(limit, config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.gather(*state.tasks, return_exceptions=True)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a connection that is aborted at the end of the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(path: str, *headers: str, body: bytes = b"", method: str = "POST") -> bytes:
    """Returns the bytes of a request; ``headers`` must include Content-Length or Transfer-Encoding."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> tuple[bytes, bytes]:
    """Sends a request, and returns the head and the body of its answer."""
    writer.write(text)
    return await read_answer(reader)


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Returns the next answer: its head in lower case, and its body, with a length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        return head, await reader.readuntil(b"0\r\n\r\n")
    return head, await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))


async def sent_and_received(port: int, *chunks: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the chunks and returns all bytes that arrive until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def problem(answer: bytes) -> tuple[int, str]:
    """Returns status and code of a problem answer, and checks its required headers."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    found = json.loads(body)
    assert f"x-request-id: {found['request_id']}".encode() in head
    return int(head.split(b" ")[1]), found["code"]
