"""A client of raw bytes that stays, disconnects or stalls as instructed, and records what it sent and received."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tests.live.chaos.reply import Reply
from tests.toolkit.websocket_client import CLOSE, FIN

Ending = Literal["answered", "left", "lost", "stuck", "deleted", "missing"]
"""The last two are of resumable streams: deleted by the client, or gone although no client deleted it."""
Stage = Literal["connecting", "sending", "waiting", "reading"]
STUCK_S = 45.0
"""Longer than every deadline of the tests, so a request that takes longer is a fault."""
READ_BYTES = 64 * 1024
RESUMABLE = "resumable"
"""The dialect of ``POST /v1/streams``."""
WEBSOCKET = "websocket"
"""The dialect of the first message of a WebSocket, which follows the handshake in the content."""


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        outcomes_of: maps a complete reply to its possible outcomes.
        expected: the outcome without faults.
    """

    token: str
    dialect: str
    content: bytes
    outcomes_of: Callable[[Reply], set[str]]
    expected: str

    @property
    def head_bytes(self) -> int:
        return self.content.index(b"\r\n\r\n") + 4

    @property
    def is_resumable(self) -> bool:
        """Whether it starts a stream that is read with further requests."""
        return self.dialect == RESUMABLE


@dataclass(frozen=True)
class Manner:
    """The behaviour of a client. It stays, or disconnects after a number of bytes sent or received, or after a wait."""

    leaves_after_sent: int | None = None
    leaves_after_received: int | None = None
    leaves_after_s: float | None = None
    stalls_s: float = 0.0
    """Does not read for this time, with a small receive buffer."""
    pieces: int = 1
    """The request is sent in this number of pieces."""
    drops: tuple[int, ...] = ()
    """For a resumable stream: the client drops each reading connection after this number of events, and resumes."""
    then: Literal["reads", "deletes", "leaves"] = "reads"
    """For a resumable stream: read to the end, delete the stream while reading, or never read."""


STAYS = Manner()


class Break(NamedTuple):
    """A connection that ended before its answer. ``port``: of the client; 0 if the connection was not accepted."""

    port: int
    began: float
    ended: float


@dataclass(frozen=True)
class Seen:
    """The result of a request as its client saw it. ``outcomes``: the possible outcomes of the answer."""

    ask: Ask
    ending: Ending
    stage: Stage
    began: float
    ended: float
    sent: int
    outcomes: frozenset[str] = frozenset()
    status: int = 0
    is_counted: bool = True
    """Whether the answer is to this request and not to its connection."""
    port: int = 0
    """The client's port. The connection of a resumable stream's POST stays open until the client is done."""
    breaks: tuple[Break, ...] = ()
    """The connections that read or deleted a resumable stream and broke."""
    refused_reads: int = 0
    """How often the gateway refused such a connection with 429."""


class Client:
    """One request on a separate connection."""

    def __init__(self, ask: Ask, manner: Manner) -> None:
        self._ask = ask
        self._manner = manner
        self._stage: Stage = "connecting"
        self._sent = 0
        self._port = 0
        self.received = b""

    async def run(self, port: int) -> Seen:
        began = time.monotonic()
        ending: Ending = "stuck"
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK_S):
                ending = await self._exchanged(port)
        return self._seen(ending, began)

    def _seen(self, ending: Ending, began: float) -> Seen:
        seen = Seen(self._ask, ending, self._stage, began, time.monotonic(), self._sent, port=self._port)
        reply = Reply.of(self.received)
        if reply is None or not reply.is_whole:
            return seen
        outcomes = frozenset(self._ask.outcomes_of(reply))
        is_counted = reply.headers.get("x-request-id") == self._ask.token
        return replace(
            seen, ending="answered", stage="reading", outcomes=outcomes, status=reply.status, is_counted=is_counted
        )

    async def _exchanged(self, port: int) -> Ending:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
        except OSError:
            return "lost"
        self._port = port_of(writer)
        try:
            self._stage = "sending"
            if await self._leaves_while_sending(reader, writer):
                return "left"
            self._stage = "waiting"
            return await self._read(reader)
        except OSError:
            with suppress(OSError):
                await self._read_rest(reader)
            return "lost"
        finally:
            writer.transport.abort()

    async def _leaves_while_sending(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        return await self._leaves_before(len(self._ask.content), writer)

    async def _leaves_before(self, end: int, writer: asyncio.StreamWriter) -> bool:
        """Sends the content up to ``end``."""
        content, pieces = self._ask.content, self._manner.pieces
        stop = self._manner.leaves_after_sent
        size = -(-len(content) // pieces)
        end = end if stop is None else min(stop, end)
        while self._sent < end:
            piece = content[self._sent : min(self._sent + size, end)]
            writer.write(piece)
            await writer.drain()
            self._sent += len(piece)
            if pieces > 1:
                await asyncio.sleep(0.01)
        return self._sent == stop

    async def _read(self, reader: asyncio.StreamReader) -> Ending:
        await asyncio.sleep(self._manner.stalls_s)
        try:
            async with asyncio.timeout(self._manner.leaves_after_s):
                return await self._read_rest(reader)
        except TimeoutError:
            return "left"

    async def _read_rest(self, reader: asyncio.StreamReader) -> Ending:
        stop = self._manner.leaves_after_received
        while data := await reader.read(READ_BYTES):
            self._stage = "reading"
            self.received += data
            if stop is not None and len(self.received) >= stop:
                return "left"
        return "lost"


class SocketClient(Client):
    """Sends one message when the WebSocket is open, and closes the connection after the terminal event."""

    async def _leaves_while_sending(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if await self._leaves_before(self._ask.head_bytes, writer):
            return True
        while (reply := Reply.of(self.received)) is None:
            if not (data := await reader.read(READ_BYTES)):
                raise ConnectionResetError
            self.received += data
        return reply.status == 101 and await super()._leaves_while_sending(reader, writer)

    async def _read_rest(self, reader: asyncio.StreamReader) -> Ending:
        stop = self._manner.leaves_after_received
        while (reply := Reply.of(self.received)) is None or not reply.is_whole:
            if not (data := await reader.read(READ_BYTES)):
                return "lost"
            self.received += data
            if not _is_closed_unanswered(Reply.of(self.received)):
                self._stage = "reading"
            if stop is not None and len(self.received) >= stop:
                return "left"
        return "answered"


def _is_closed_unanswered(reply: Reply | None) -> bool:
    """Whether the gateway closed an open WebSocket without an answer, as a drain does before it reads the message."""
    return reply is not None and reply.status == 101 and reply.body[:1] == bytes([FIN | CLOSE])


def port_of(writer: asyncio.StreamWriter) -> int:
    return int(writer.get_extra_info("sockname")[1])
