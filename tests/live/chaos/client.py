"""Clients of raw bytes that stay, disconnect or stall as instructed, and record what they sent and received.

Also the part of an answer that a client received, and its possible outcomes.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from app.core.errors import GatewayError, Outcome
from tests.toolkit.engine import every_error
from tests.toolkit.events import Event, checked, events_in, parsed
from tests.toolkit.websocket_client import CLOSE, FIN, TEXT, frames_in

Ending = Literal["answered", "left", "lost", "stuck", "deleted", "missing"]
"""The last two are of resumable streams: deleted by the client, or gone although no client deleted it."""
Stage = Literal["connecting", "sending", "waiting", "reading"]
STUCK_S = 45.0
"""Longer than every deadline of the tests, so a request that takes longer is a fault."""
READ_BYTES = 64 * 1024
BUSY = {429, 503}
"""Statuses after which the client of a resumable stream asks again."""
AGAIN_S = 0.1
RESUMABLE = "resumable"
"""The dialect of ``POST /v1/streams``."""
WEBSOCKET = "websocket"
"""The dialect of the first message of a WebSocket, which follows the handshake in the content."""


OUTCOME_BY_CODE = {error.code: error.outcome for error in every_error(GatewayError)}
OUTCOMES_BY_STATUS = {
    400: {Outcome.CLIENT_ERROR, Outcome.EARLY_EXIT, Outcome.MODEL_ERROR},
    404: {Outcome.CLIENT_ERROR},
    422: {Outcome.CLIENT_ERROR},
    429: {Outcome.REJECTED},
    500: {Outcome.MODEL_ERROR},
    502: {Outcome.MODEL_ERROR, Outcome.CONTRACT_VIOLATION},
    503: {Outcome.UNAVAILABLE, Outcome.REJECTED},
    504: {Outcome.TIMEOUT},
}
"""For dialects whose errors have no code. A 500 of /v2 is an error of the model."""
FAILURES = frozenset(Outcome) - {Outcome.OK, Outcome.INTERNAL}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    @classmethod
    def of(cls, received: bytes) -> "Reply | None":
        """Returns None if the head is not complete."""
        head, separator, rest = received.partition(b"\r\n\r\n")
        if not separator:
            return None
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("upgrade") == "websocket" and head.startswith(b"HTTP/1.1 101 "):
            events = events_of_messages(rest)
            body, is_whole = rest, bool(events) and events[-1].name != "output"
        elif headers.get("transfer-encoding") == "chunked":
            body, is_whole = dechunked(rest)
        else:
            body, is_whole = rest, len(rest) == int(headers.get("content-length", 0))
        return cls(int(status.split()[1]), headers, body, is_whole)

    @property
    def text(self) -> str:
        return self.body.decode()


def dechunked(body: bytes) -> tuple[bytes, bool]:
    """Returns the content so far, and whether the last chunk was received."""
    content = b""
    while b"\r\n" in body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return content, body == b"\r\n"
        content, body = content + body[:length], body[length + 2 :]
    return content, False


def events_of_messages(frames: bytes) -> list[Event]:
    """The events in the complete text messages of a gateway, numbered from 1."""
    messages = [json.loads(data) for opcode, data in frames_in(frames) if opcode == TEXT]
    return [Event(number, each["event"], each["data"]) for number, each in enumerate(messages, 1)]


def of_messages(reply: Reply) -> set[str]:
    """For the answer to the only message of a WebSocket."""
    return of_end(checked(events_of_messages(reply.body))[-1]) if reply.status == 101 else _of_error(reply)


def of_pipeline(reply: Reply) -> set[str]:
    if reply.status != 200:
        return _of_error(reply)
    return {Outcome.EARLY_EXIT if "x-early-exit" in reply.headers else Outcome.OK}


def of_start(reply: Reply) -> set[str]:
    """For ``POST /v1/streams``. Empty if the stream was started, because its terminal event has the outcome."""
    return set() if reply.status == 201 else _of_error(reply)


def of_events(reply: Reply) -> set[str]:
    """Checks that there is exactly one terminal event, and nothing after it."""
    if reply.status != 200:
        return _of_error(reply)
    return of_end(checked(list(events_in(reply.text.split("\n"))))[-1])


def of_end(end: Event) -> set[str]:
    """The outcomes of a terminal event."""
    if end.name == "error":
        return {OUTCOME_BY_CODE[end.data["code"]]}
    return {Outcome.EARLY_EXIT if end.data["early_exit"] else Outcome.OK}


def of_oip(reply: Reply) -> set[str]:
    return {Outcome.OK} if reply.status == 200 else _of_error(reply)


def of_generate_stream(reply: Reply) -> set[str]:
    """There is no terminal event: an error is the last object, or the status."""
    if reply.status != 200:
        return _of_error(reply)
    return set(FAILURES) if "error" in _last_data(reply) else {Outcome.OK}


def of_openai(reply: Reply) -> set[str]:
    if reply.status != 200:
        return _of_error(reply)
    ends = [line for line in reply.text.split("\n") if line == "data: [DONE]" or line.startswith('data: {"error"')]
    assert len(ends) == 1, reply.text[-500:]
    if ends == ["data: [DONE]"]:
        return {Outcome.OK, Outcome.EARLY_EXIT}
    return {OUTCOME_BY_CODE[_last_data(reply)["error"]["code"]]}


def _last_data(reply: Reply) -> dict[str, dict[str, str]]:
    lines = [line for line in reply.text.split("\n") if line.startswith("data: ")]
    last: dict[str, dict[str, str]] = json.loads(lines[-1].removeprefix("data: ")) if lines else {}
    return last


def _of_error(reply: Reply) -> set[str]:
    """Reads a problem object, or the error of OpenAI or of the Open Inference Protocol, which has no code."""
    body = json.loads(reply.text.removeprefix("data: "))
    error = body.get("error", body)
    return {OUTCOME_BY_CODE[error["code"]]} if isinstance(error, dict) else OUTCOMES_BY_STATUS[reply.status]


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
    """One request on a separate connection to the port of a gateway or of a link."""

    def __init__(self, ask: Ask, manner: Manner, port: int) -> None:
        self._ask = ask
        self._manner = manner
        self._gateway_port = port
        self._stage: Stage = "connecting"
        self._sent = 0
        self._port = 0
        self._received = b""

    async def run(self) -> Seen:
        began = time.monotonic()
        ending: Ending = "stuck"
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK_S):
                ending = await self._exchanged()
        return self._seen(ending, began)

    def _seen(self, ending: Ending, began: float) -> Seen:
        seen = Seen(self._ask, ending, self._stage, began, time.monotonic(), self._sent, port=self._port)
        reply = Reply.of(self._received)
        if reply is None or not reply.is_whole:
            return seen
        outcomes = frozenset(self._ask.outcomes_of(reply))
        is_counted = reply.headers.get("x-request-id") == self._ask.token
        return replace(
            seen, ending="answered", stage="reading", outcomes=outcomes, status=reply.status, is_counted=is_counted
        )

    async def _exchanged(self) -> Ending:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._gateway_port, limit=READ_BYTES)
        except OSError:
            return "lost"
        self._port = writer.get_extra_info("sockname")[1]
        try:
            self._stage = "sending"
            if await self._leaves_while_sending(reader, writer):
                return "left"
            self._stage = "waiting"
            await asyncio.sleep(self._manner.stalls_s)
            try:
                async with asyncio.timeout(self._manner.leaves_after_s):
                    return await self._read(reader)
            except TimeoutError:
                return "left"
        except OSError:
            with suppress(OSError):
                await self._receive(reader, until_whole=False)
            return "lost"
        finally:
            writer.transport.abort()

    async def _leaves_while_sending(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Sends the content; the message of a WebSocket only when it is open."""
        if self._ask.dialect == WEBSOCKET:
            if await self._leaves_before(self._ask.content.index(b"\r\n\r\n") + 4, writer):
                return True
            while (reply := Reply.of(self._received)) is None:
                if not (data := await reader.read(READ_BYTES)):
                    raise ConnectionResetError
                self._received += data
            if reply.status != 101:
                return False
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
        return await self._receive(reader, until_whole=self._ask.dialect == WEBSOCKET)

    async def _receive(self, reader: asyncio.StreamReader, *, until_whole: bool) -> Ending:
        """Reads to the end of the connection, or of the answer."""
        stop, reply = self._manner.leaves_after_received, Reply.of(self._received) if until_whole else None
        while reply is None or not reply.is_whole:
            if not (data := await reader.read(READ_BYTES)):
                return "lost"
            self._received += data
            reply = Reply.of(self._received) if until_whole else None
            if reply is None or reply.status != 101 or reply.body[:1] != bytes([FIN | CLOSE]):
                self._stage = "reading"  # a drain closes an open WebSocket before it reads the message
            if stop is not None and len(self._received) >= stop:
                return "left"
        return "answered"


class StreamClient(Client):
    """Starts a resumable stream, reads it over several connections, and may delete it.

    The connection of the POST stays open until the client is done, so its worker is the one that runs the stream.
    """

    def __init__(self, ask: Ask, manner: Manner, port: int, has_gateway: Callable[[], bool]) -> None:
        """``has_gateway``: whether the gateway still runs, so that it makes sense to ask again."""
        super().__init__(ask, manner, port)
        self._has_gateway = has_gateway
        self._path = ""
        self._events: list[Event] = []
        self._asked_to_delete = False
        """Whether the gateway may have deleted the stream."""
        self._breaks: list[Break] = []
        self._refused_reads = 0

    def _seen(self, ending: Ending, began: float) -> Seen:
        seen = replace(super()._seen(ending, began), breaks=tuple(self._breaks), refused_reads=self._refused_reads)
        if not self._path:
            return seen
        if not self._has_ended:
            return replace(seen, ending=ending, outcomes=frozenset())
        outcomes = frozenset(of_end(checked(self._events)[-1]))
        if outcomes == {Outcome.CANCELLED} and not self._asked_to_delete:
            outcomes = frozenset()  # matches nothing
        return replace(seen, ending="answered", outcomes=outcomes)

    @property
    def _has_ended(self) -> bool:
        return bool(self._events) and self._events[-1].name != "output"

    async def _read(self, reader: asyncio.StreamReader) -> Ending:
        """Reads the answer to the POST, then the stream."""
        ending = await self._receive(reader, until_whole=True)
        reply = Reply.of(self._received)
        if ending != "answered" or reply is None:
            self._stage = "waiting"
            return ending
        if reply.status != 201:
            return "answered"
        self._path = reply.headers["location"]
        if self._manner.then == "leaves":
            return "left"
        drops = list(self._manner.drops)
        while not self._has_ended:
            status = await self._read_events(drops[0] if drops else None)
            if status == 200:
                drops = drops[1:]
            elif status in BUSY or not status:
                await asyncio.sleep(AGAIN_S)
            else:
                return "deleted" if status == 404 and self._asked_to_delete else "missing"
            if not status and not self._has_gateway():
                return "lost"
        return "answered"

    async def _read_events(self, stop: int | None) -> int:
        """Reads the next events over one connection, at most ``stop``. Returns the status; 0 without an answer.

        After its deletion the stream is read to its end: until then the worker that runs it may still be killed.
        """
        before = len(self._events)

        async def has_enough(reply: Reply) -> bool:
            if reply.status != 200:
                return reply.is_whole
            self._events[before:] = parsed(reply.body[: reply.body.rfind(b"\n\n") + 2].decode())
            if self._manner.then == "deletes" and not self._asked_to_delete and self._events:
                await self._delete()
            is_dropping = stop is not None and len(self._events) >= before + stop and not self._asked_to_delete
            return self._has_ended or is_dropping

        after = f"Last-Event-ID: {before}\r\n" if before else ""
        return await self._asked("GET", after, has_enough)

    async def _delete(self) -> None:
        self._asked_to_delete = True

        async def is_answered(reply: Reply) -> bool:
            assert reply.status in {204, *BUSY}, reply
            return reply.is_whole

        await self._asked("DELETE", "", is_answered)

    async def _asked(self, method: str, header: str, has_enough: Callable[[Reply], Awaitable[bool]]) -> int:
        """Sends one request over its own connection. Returns the status; 0 without an answer.

        ``has_enough`` is called with each part of the answer. A connection that ends before is noted as a break.
        """
        head = f"{method} {self._path} HTTP/1.1\r\nHost: localhost\r\n{header}Connection: close\r\n\r\n"
        began, port, reply, is_enough = time.monotonic(), 0, None, False
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._gateway_port, limit=READ_BYTES)
            port, received = writer.get_extra_info("sockname")[1], b""
            try:
                writer.write(head.encode())
                while not is_enough and (data := await reader.read(READ_BYTES)):
                    received += data
                    reply = Reply.of(received)
                    is_enough = reply is not None and await has_enough(reply)
            finally:
                writer.transport.abort()
        if not is_enough:
            self._breaks.append(Break(port, began, time.monotonic()))
        status = 0 if reply is None else reply.status
        self._refused_reads += status == 429
        return status
