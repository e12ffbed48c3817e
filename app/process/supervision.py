"""The life of the process: its background tasks, the signals that end it, and the servers on its listening sockets.

Each connection needs a file descriptor (``ulimit -n``), and without one it is reset.
"""

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar, cast

import uvicorn
from starlette.types import ASGIApp

from app.core.errors import Unusable
from app.http1.protocol import ConnectionLimit, HttpConnection
from app.settings import PREFIX

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class ShutdownRequested(Exception):
    """A signal arrived before the work was done."""


class Supervisor:
    """Owns every background task of the process. ``requested`` is set by the first signal, ``hurried`` by the second.

    A background task must never end. If it ends, the supervisor logs the traceback and requests the shutdown. Errors
    that a task can recover from are handled inside the task.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()
        self.has_failed = False
        """Whether a task ended unexpectedly."""

    def request(self) -> None:
        (self.hurried if self.requested.is_set() else self.requested).set()

    def listen_to_signals(self) -> None:
        """Signals that are ignored at the start of the process stay ignored (SIGHUP with nohup)."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.request)

    async def unless_requested(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Returns the result of ``work``. If a signal arrives first, cancels ``work`` and raises ShutdownRequested."""
        working = asyncio.create_task(work)
        await first_of(working, self.requested.wait())
        if self.requested.is_set():
            raise ShutdownRequested
        return working.result()

    @asynccontextmanager
    async def running(
        self, name: str, work: Coroutine[Any, Any, None], *, stop: Callable[[], None] | None = None
    ) -> AsyncIterator[None]:
        """Runs ``work`` for the duration of the block.

        At the end of the block ``stop`` asks the task to end; without ``stop`` the task is cancelled. Either way the
        block waits for the task.
        """
        task = asyncio.create_task(work, name=name)
        is_stopping = False

        def check(ended: asyncio.Task[None]) -> None:
            error = None if ended.cancelled() else ended.exception()
            if is_stopping and error is None:
                return
            _log.critical("the background task '%s' ended unexpectedly; shutting down", name, exc_info=error)
            if not self.has_failed:
                self.has_failed = True
                self.request()

        task.add_done_callback(check)
        try:
            yield
        finally:
            is_stopping = True
            (stop or task.cancel)()
            await asyncio.wait({task})


async def first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Returns when the first of ``waits`` is done, or after the time, and cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


KEEP_ALIVE_S = 75
BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
LAST_BYTES_S = 5.0
"""Time limit for ended requests and streams to send their last bytes."""
GRACE_S = 5
"""How long a stopped server waits for open responses, in seconds."""

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""By address that listens on all interfaces: the address for calls from this machine."""


def url_of(host: str, port: int) -> str:
    """Returns the URL for calls from this machine to a server that listens on ``host``."""
    host = _LOOPBACK.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def listening(host: str, port: int, setting: str, *, shares_port: bool = False) -> Iterator[socket.socket]:
    """A socket for a server, closed at the end of the block. Raises Unusable.

    It listens at once, because two sockets can be bound to the same port as long as neither listens.
    ``shares_port``: the kernel distributes the connections over all sockets of this user that share the port and
    listen. Then the server makes it listen: connections of a process that still starts would wait, or be reset.
    """
    with _bound(host, port, setting, shares_port=shares_port) as listener:
        if not shares_port:
            listener.listen(BACKLOG)
        yield listener


@contextmanager
def reserved(host: str, port: int, setting: str) -> Iterator[int]:
    """Reserves a port for the sockets of other processes that share it. Raises Unusable."""
    with listening(host, port, setting) as first:  # fails if the port is taken, also by sockets that share it
        port = int(first.getsockname()[1])
    with _bound(host, port, setting, shares_port=True):
        yield port


def require_free_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raises Unusable, which names all ports that are taken and ports to use.

    ``ports``: by the name of the setting.
    """
    taken = []
    if 0 < min(ports.values()) == max(ports.values()) and len(ports) > 1:
        raise Unusable(f"{' and '.join(ports)} are both {min(ports.values())}: two ports are needed")
    for setting, port in ports.items():
        try:
            with listening(host, port, setting):
                pass
        except Unusable as exc:
            taken.append(str(exc))
    if taken:
        flags = []
        for setting in ports:
            with listening(host, 0, setting) as free:
                flag = setting.removeprefix(PREFIX).lower().replace("_", "-")
                flags.append(f"--{flag} {free.getsockname()[1]}")
        taken.append(f"Stop the other process, or use other ports: {' '.join(flags)}")
        raise Unusable("\n".join(taken))


def _bound(host: str, port: int, setting: str, *, shares_port: bool) -> socket.socket:
    """Raises Unusable."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise Unusable(f"{setting}: cannot listen on {host}:{port}: {exc.strerror}") from exc
    return listener


@asynccontextmanager
async def serving(
    app: ASGIApp, listener: socket.socket, supervisor: Supervisor, limit: ConnectionLimit
) -> AsyncIterator[uvicorn.Server]:
    """Serves the application on the socket for the duration of the block, and then sends the open responses."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(HttpConnection, limit)),  # called for each connection
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
    server = uvicorn.Server(config)
    # the process handles the signals, and drains before it stops the servers
    server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]
    name = f"server on port {listener.getsockname()[1]}"
    stop = partial(setattr, server, "should_exit", True)
    async with supervisor.running(name, server.serve(sockets=[listener]), stop=stop):
        yield server


RESERVED = 512
"""Descriptors for other uses than accepted connections: rejected connections, Triton, Redis, files, the log."""
CHECK_S = 1.0


def connections_within(limit: int) -> int:
    """Returns how many of ``limit`` connections the process can open; raises its limit of open files if necessary.

    The other connections get 429, which is logged and counted, while the event loop resets connections for which there
    is no file descriptor.
    """
    wanted, (files, most) = limit + RESERVED, resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < wanted:
        with suppress(OSError, ValueError):
            raised = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, most))
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = wanted if files == resource.RLIM_INFINITY else files
    fitting = min(limit, max(files - RESERVED, files // 2))
    if fitting < limit:
        _log.warning(
            "the limit of open files is %d, so that a process accepts %d connections and not %d "
            "(GATEWAY_MAX_CONNECTIONS); raise the limit (ulimit -n) to %d",
            *(files, fitting, limit, wanted),
        )
    return fitting


async def watch_open_files(count: Callable[[], None]) -> None:
    """Calls ``count`` in each second in which no file can be opened. Logs the beginning and the end."""
    was_full = False
    while True:
        is_full = False
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as exc:
            if is_full := exc.errno in {errno.EMFILE, errno.ENFILE}:
                count()
        if is_full and not was_full:
            _log.error("no file descriptor is free: new connections are reset; raise the limit (ulimit -n)")
        elif was_full and not is_full:
            _log.warning("file descriptors are free again")
        was_full = is_full
        await asyncio.sleep(CHECK_S)
