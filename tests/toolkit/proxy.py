"""A TCP proxy on loopback that causes faults. It replaces netem, whose kernel module is often missing."""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from tests.toolkit.waiting import loop_in_a_thread

Way = Literal["up", "down"]
"""Up: from the client of the link to its server."""
_READ_BYTES = 16 * 1024
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing the socket sends RST immediately."""


@dataclass(frozen=True)
class Spoiling:
    """The faults of a link."""

    delay_s: float = 0.0
    """Before each piece of at most 16 KiB."""
    held: frozenset[Way] = frozenset()
    """Directions in which the link drops all data until the fault ends. Both: a blackhole; one: half-open."""
    cut_within: int | None = None
    """Each connection is reset after a random number of bytes up to this one."""
    refuses: bool = False
    """New connections are reset."""


CLEAN = Spoiling()
DELAY = Spoiling(delay_s=0.05)
BLACKHOLE = Spoiling(held=frozenset({"up", "down"}))
HALF_OPEN = Spoiling(held=frozenset({"down"}))
RESETS = Spoiling(cut_within=2000)
CUT = Spoiling(refuses=True)


class Link:
    """Between ``port`` on loopback and ``target``, a ``host:port``."""

    def __init__(self, target: str, seed: int) -> None:
        self._host, _, port = target.partition(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._spoiling = CLEAN
        self._changed = asyncio.Event()
        self._open = set[asyncio.StreamWriter]()
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Link"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self
            server.close()
            self.reset_all()

    def spoil(self, spoiling: Spoiling) -> None:
        self._spoiling = spoiling
        self._changed.set()
        self._changed = asyncio.Event()

    def reset_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self._spoiling.refuses:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            self._open.discard(writer)
            _reset(writer)
            return
        self._open.add(far_writer)
        ways = [self._carry("up", reader, far_writer), self._carry("down", far_reader, writer)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in (writer, far_writer):
                self._open.discard(each)
                _reset(each)

    async def _carry(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards the data and its end. Raises ConnectionError to reset both directions."""
        passed = 0
        while data := await reader.read(_READ_BYTES):
            await self._spoiled(way)
            passed += len(data)
            within = self._spoiling.cut_within
            if within is not None and passed > self._random.randrange(within):
                writer.write(data[: self._random.randrange(len(data))])
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    async def _spoiled(self, way: Way) -> None:
        await asyncio.sleep(self._spoiling.delay_s)
        while way in self._spoiling.held:
            await self._changed.wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


class Network(Link):
    """A link whose event loop runs in another thread, for tests without one."""

    def __init__(self, port: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(f"127.0.0.1:{port}", 0)
        self._loop = loop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Drops all connections and refuses new ones until ``restore``."""

        async def cut() -> None:
            self.spoil(CUT)
            self.reset_all()

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result(5)

    def restore(self) -> None:
        self._loop.call_soon_threadsafe(self.spoil, CLEAN)


SomeNetwork = TypeVar("SomeNetwork", bound=Network)


class DroppingNetwork(Network):
    """Drops each resumable stream that is read from its start, before event 3."""

    dropped = 0

    async def _carry(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = b""
        with suppress(ConnectionError):
            while chunk := await reader.read(65536):
                seen += chunk
                _, resumable, events = seen.rpartition(b"retry: ")
                if resumable and b"id: 1\n" in events and b"id: 3\n" in chunk:
                    self.dropped += 1
                    writer.write(chunk.partition(b"id: 3\n")[0])
                    break
                writer.write(chunk)
                await writer.drain()
        writer.close()


@contextmanager
def network_to(port: int, kind: type[SomeNetwork] = Network) -> Iterator[SomeNetwork]:
    async def stopped() -> None:
        await running.__aexit__(None, None, None)
        if relays := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(relays, timeout=2)

    with loop_in_a_thread() as loop:
        network = kind(port, loop)
        running = network.running()
        asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(5)
        try:
            yield network
        finally:
            asyncio.run_coroutine_threadsafe(stopped(), loop).result(5)
