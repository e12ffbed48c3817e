"""Sends hostile requests over persistent connections, and parses the answers strictly."""

import asyncio
from contextlib import suppress

from tests.live.chaos.hostile.heads import Hostile
from tests.live.chaos.reply import Reply

ANSWER_S = 20.0
FRAMING_S = 0.3
"""For an answer to a message without a defined end: the gateway may wait for more of it."""


class Sender:
    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: Hostile) -> Reply | None:
        """Returns None without a complete answer. Raises EOFError or OSError if the connection ended in an answer."""
        if request.is_exact:
            return await self._exchanged(request, ANSWER_S)
        await self.close()
        try:
            return await self._exchanged(request, FRAMING_S)
        except (TimeoutError, EOFError, OSError):
            return None
        finally:
            await self.close()  # a second answer may follow

    async def _exchanged(self, request: Hostile, answer_s: float) -> Reply | None:
        reader, writer = self._streams or await self._connected()
        try:
            writer.write(request.content)
            if request.leaves:
                await writer.drain()
                await self.close()
                return None
            async with asyncio.timeout(answer_s):
                return await self._answer(reader, is_head=request.content.startswith(b"HEAD "))
        except (TimeoutError, EOFError, OSError):
            await self.close()
            raise

    async def _answer(self, reader: asyncio.StreamReader, *, is_head: bool) -> Reply:
        received = await reader.readuntil(b"\r\n\r\n")
        while received.startswith(b"HTTP/1.1 100 "):
            received = await reader.readuntil(b"\r\n\r\n")
        reply = Reply.of(received)
        assert reply is not None
        length = reply.headers.get("content-length")
        if reply.headers.get("transfer-encoding") == "chunked":
            while not reply.is_whole:
                received += await reader.readuntil(b"\r\n")
                reply = Reply.of(received)
                assert reply is not None
        elif length is not None and not is_head:
            reply = Reply.of(received + await reader.readexactly(int(length)))
            assert reply is not None
        if reply.headers.get("connection") == "close":
            await self.close()
        return reply

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        return self._streams

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
            with suppress(OSError):
                await asyncio.sleep(0)
