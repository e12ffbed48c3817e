"""The gateway's ports, and a uvicorn on each."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from app.api.protocol import BoundedProtocol

KEEP_ALIVE_S = 75
FAREWELL_S = 5
"""For the last bytes of ended streams and requests to leave."""


class PortTaken(Exception):
    """A port cannot be had; the message names its setting."""


@contextmanager
def bound(host: str, port: int, setting: str) -> Iterator[socket.socket]:
    """A socket on the port, closed at the end. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as exc:
            raise PortTaken(f"{setting}: cannot listen on {host}:{port}: {exc.strerror}") from exc
        yield listener


class _Server(uvicorn.Server):
    """Leaves the signals to the process, which drains first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Serves the application inside; at the end, lets what is under way leave."""
    server = _Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FAREWELL_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
