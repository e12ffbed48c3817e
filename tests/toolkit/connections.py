"""HTTP/1.1 as bytes, for clients that keep, cut or stall their connections.

Also of a gateway with several workers: finds the worker of a connection, and sends load.
"""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tests.toolkit.listener import read_answer
from tests.toolkit.processes import GatewayProcess


def post(
    path: str, body: object, *headers: str, size: int | None = None, media_type: str = "application/json"
) -> bytes:
    """Returns the bytes of a POST.

    Args:
        path: the request target.
        body: bytes, or a value that is sent as JSON.
        headers: further lines of the head.
        size: what Content-Length declares, if it is not the length of the body.
        media_type: of the body.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(content) if size is None else size
    lines = ["Host: localhost", f"Content-Type: {media_type}", f"Content-Length: {length}", *headers]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + content


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def dialed(gateway: GatewayProcess, timeout_s: float = 20.0, receive_bytes: int | None = None) -> socket.socket:
    """``receive_bytes``: makes the window of the connection small."""
    address, connection = urlsplit(gateway.url), socket.socket()
    connection.settimeout(timeout_s)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((address.hostname, address.port))
    return connection


def received(connection: socket.socket, until: bytes) -> bytes:
    """Returns what arrives up to ``until``."""
    data = b""
    while until not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def rest(connection: socket.socket) -> bytes:
    """Returns what arrives until the gateway closes the connection."""
    data = b""
    with connection:
        while part := connection.recv(65536):
            data += part
    return data


def workers_of(gateway: GatewayProcess) -> list[int]:
    """Returns the process ids of the workers that run."""
    return [child.pid for child in psutil.Process(gateway.process.pid).children() if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "app.process.workers" in process.cmdline()
    except psutil.NoSuchProcess:  # it has ended; also a zombie
        return False


def owner_of(gateway: GatewayProcess, port: int) -> int | None:
    """Returns the worker that accepted the connection from this local port."""
    for worker in workers_of(gateway):
        for connection in psutil.Process(worker).net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                return worker
    return None


def deaths_of(gateway: GatewayProcess) -> float:
    """How many workers have died. A worker that dies now may reset the question."""
    while True:
        with suppress(httpx.TransportError):
            return gateway.metric("worker_deaths_total")


CONNECTIONS = 16


@dataclass
class LoadResults:
    statuses: Counter[int] = field(default_factory=Counter)
    broken: int = 0
    """The number of connections that ended before an answer was complete."""

    @property
    def answered(self) -> int:
        return self.statuses.total()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, gateway: GatewayProcess) -> "Connection":
        url = urlsplit(gateway.url)
        return cls(*await asyncio.open_connection(url.hostname, url.port))

    @property
    def port(self) -> int:
        return int(self.writer.get_extra_info("sockname")[1])

    def post(self, path: str, body: bytes) -> None:
        self.writer.write(post(path, body))

    async def get(self, path: str) -> Any:
        """Sends GET and returns the JSON of the answer."""
        self.writer.write(get(path))
        return json.loads((await read_answer(self.reader))[1])

    async def answer(self) -> int:
        """Reads the complete answer and returns its status. Raises EOFError or ConnectionError."""
        return int((await read_answer(self.reader))[0][9:12])

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    async def rest(self) -> tuple[bytes, bool]:
        """Returns all further bytes, and whether the connection was reset."""
        received = b""
        try:
            while data := await self.reader.read(65536):
                received += data
        except ConnectionError:
            return received, True
        return received, False


@asynccontextmanager
async def connections_to_each(gateway: GatewayProcess, count: int) -> AsyncIterator[dict[int, list[Connection]]]:
    """Opens ``count`` connections to each worker; the keys are the process ids of the workers."""
    found: dict[int, list[Connection]] = {worker: [] for worker in workers_of(gateway)}
    while any(len(connections) < count for connections in found.values()):
        connection = await Connection.to(gateway)
        connection.post("/v1/pipelines/nothing", b"{}")
        await connection.answer()
        owner = owner_of(gateway, connection.port)
        assert owner is not None
        if len(found[owner]) < count:
            found[owner].append(connection)
        else:
            await connection.close()
    try:
        yield found
    finally:
        for connections in found.values():
            for connection in connections:
                await connection.close()


async def load(
    gateway: GatewayProcess, path: str, body: bytes, *, requests: int, connections: int = CONNECTIONS
) -> LoadResults:
    """Sends ``requests`` requests over keep-alive connections. A new connection replaces each broken one."""
    results, remaining = LoadResults(), iter(range(requests))

    async def connect() -> Connection:
        """A worker that is killed resets connections that wait for it. They carry no request yet."""
        while True:
            with suppress(ConnectionResetError):
                return await Connection.to(gateway)

    async def client() -> None:
        connection = await connect()
        for _ in remaining:
            try:
                connection.post(path, body)
                results.statuses[await connection.answer()] += 1
            except (EOFError, ConnectionError):
                results.broken += 1
                await connection.close()
                connection = await connect()
        await connection.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return results
