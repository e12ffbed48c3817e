"""The gateway's listening sockets, and a uvicorn server on each."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from app.api.connection.protocol import ConnectionLimit, protocol_with
from app.process.supervision import Supervisor

KEEP_ALIVE_S = 75
BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
GRACE_S = 5
"""How long a stopped server waits for open responses to end."""


class PortTaken(Exception):
    """The gateway cannot listen on a port. The message names the setting."""


@contextmanager
def listening(host: str, port: int, setting: str) -> Iterator[socket.socket]:
    """A listening socket, closed at the end of the block. Raises PortTaken.

    It listens at once: two sockets can be bound to one port as long as neither listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as exc:
            raise PortTaken(f"{setting}: cannot listen on {host}:{port}: {exc.strerror}") from exc
        yield listener


class _Server(uvicorn.Server):
    """Leaves signals to the process, which drains before the servers stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Stops accepting connections; :meth:`serve` returns when the open responses have ended."""
        self.should_exit = True


@asynccontextmanager
async def serving(
    app: ASGIApp, listener: socket.socket, supervisor: Supervisor, limit: ConnectionLimit
) -> AsyncIterator[None]:
    """Serves the application on the socket for the duration of the block."""
    server = _Server(
        uvicorn.Config(
            app,
            http=protocol_with(limit),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    name = f"server on port {listener.getsockname()[1]}"
    async with supervisor.running(name, server.serve(sockets=[listener]), stop=server.stop):
        yield
