"""TCP relays that can fail."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

SomeNetwork = TypeVar("SomeNetwork", bound="Network")


class Network:
    """A relay to one port. ``cut`` drops all connections and rejects new connections until ``restore``.

    The relay runs on an event loop in its own thread; call ``cut`` and ``restore`` from any other thread.
    """

    def __init__(self, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.url = ""
        self._target = port
        self._loop = loop
        self._is_up = True
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        asyncio.run_coroutine_threadsafe(self.drop_all(), self._loop).result(5)

    def restore(self) -> None:
        self._is_up = True

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def drop_all(self) -> None:
        self._is_up = False
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_up:
            writer.transport.abort()
            return
        near, far = writer, None
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._target)
            self._open |= {near, far}
            await asyncio.gather(self._relay(reader, far), self._relay(far_reader, near))
        finally:
            for each in filter(None, (near, far)):
                self._open.discard(each)
                each.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        writer.close()


class DroppingNetwork(Network):
    """Drops each resumable stream that is read from its start, before event 3."""

    def __init__(self, port: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(port, loop)
        self.dropped = 0

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = b""
        with contextlib.suppress(ConnectionError):
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
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    network = kind(port, loop)
    server = asyncio.run_coroutine_threadsafe(network.start(), loop).result(5)
    try:
        yield network
    finally:
        asyncio.run_coroutine_threadsafe(_stopped(server, network), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stopped(server: asyncio.Server, network: Network) -> None:
    server.close()
    await network.drop_all()
    if relays := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(relays, timeout=2)
