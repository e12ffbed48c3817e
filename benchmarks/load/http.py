"""HTTP/1.1 and WebSockets on asyncio protocols: little work for each answer, so that only the servers are measured."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import cast

from benchmarks.load.orders import Answers, Flood, HttpAsk, Obedient, Report, SocketAsk, UnexpectedAnswer, request_of

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
MOST_CONNECTIONS = 4000
"""Of a flood."""
CHUNK_BYTES = 1 << 18
LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a body of unknown length."""
ENDED = 0
"""Stands for the status of a request whose connection was closed without an answer."""
_UPGRADE = (
    "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_TEXT, _MASKED, _MOST_BYTES = 0x81, 0x80, 125
"""Of a WebSocket frame (RFC 6455, 5.2): a whole text message, its mask bit, the limit for a length of one byte."""


class HttpClient:
    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    async def unary(self, asks: Sequence[HttpAsk | SocketAsk], seconds: float) -> Report:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        durations, running, ends = list[float](), len(asks), 0.0

        def answered(connection: _Connection, took_s: float) -> None:
            nonlocal running
            if connection.status != connection.expected:
                if not done.done():
                    done.set_exception(UnexpectedAnswer(connection.text))
                return
            durations.append(took_s)
            if time.perf_counter() < ends:
                connection.send()
                return
            running -= 1
            if not (running or done.done()):
                done.set_result(None)

        connections = [await self._connected(ask, answered) for ask in asks]
        start = time.perf_counter()
        ends = start + seconds
        try:
            for each in connections:
                each.send()
            await done
        finally:
            _close(connections)
        return Report(len(durations), time.perf_counter() - start, tuple(durations))

    async def read_stream(self, ask: HttpAsk, read: Callable[[int], None]) -> None:
        reader, writer = await self._opened(ask)
        tail = b""
        try:
            while ask.end not in tail:
                chunk = b"" if tail.endswith(LAST_CHUNK) else await reader.read(CHUNK_BYTES)
                if not chunk:
                    raise UnexpectedAnswer(f"The stream ended unexpectedly: {tail!r}")
                overlap = tail[-(len(ask.event) - 1) :]
                read((overlap + chunk).count(ask.event))
                tail = (tail + chunk)[-300:]
        finally:
            writer.transport.abort()

    async def hold(self, ask: HttpAsk) -> Callable[[], None]:
        reader, writer = await self._opened(ask)
        await reader.readuntil(b"\r\n\r\n")

        def close() -> None:
            """Keeps the writer until then: one that is collected closes its connection."""
            writer.transport.abort()

        return close

    async def above_capacity(self, order: Flood | Obedient) -> Answers:
        starts = time.perf_counter() + order.warm_up_s
        ends, answers = starts + order.seconds, Answers(order.seconds)

        def ask(connection: _Connection) -> None:
            answers.asked += starts <= time.perf_counter() < ends
            connection.send()

        def count(connection: _Connection, took_s: float) -> None:
            if starts <= time.perf_counter() < ends:
                answers.add(connection.status, took_s)

        await (self._flood if isinstance(order, Flood) else self._obey)(order, ends, ask, count)  # type: ignore[operator]
        return answers

    async def _flood(self, order: Flood, ends: float, ask: "Ask", count: "Answered") -> None:
        idle, every = list[_Connection](), list[_Connection]()
        opening = set[asyncio.Task[None]]()

        def answered(connection: _Connection, took_s: float) -> None:
            count(connection, took_s)
            idle.append(connection)

        async def ask_new() -> None:
            every.append(await self._connected(order.ask, answered))
            ask(every[-1])

        begun, asked = time.perf_counter(), 0
        while (now := time.perf_counter()) < ends:
            for _ in range(int((now - begun) * order.rate) - asked):
                asked += 1
                while idle and not idle[-1].is_open:
                    idle.pop()
                if idle:
                    ask(idle.pop())
                elif len(every) + len(opening) < MOST_CONNECTIONS:
                    task = asyncio.create_task(ask_new())
                    opening.add(task)
                    task.add_done_callback(opening.discard)
            await asyncio.sleep(order.tick_s)
        _close(every)

    async def _obey(self, order: Obedient, ends: float, ask: "Ask", count: "Answered") -> None:
        loop, every = asyncio.get_running_loop(), list[_Connection]()

        def answered(connection: _Connection, took_s: float) -> None:
            count(connection, took_s)
            waits = order.obeys and connection.status == 429
            loop.call_later(connection.retry_s if waits else max(order.pause_s - took_s, 0.0), again, connection)

        def again(connection: _Connection) -> None:
            if time.perf_counter() < ends and connection.is_open:
                ask(connection)

        for number in range(order.callers):
            every.append(await self._connected(order.ask, answered))
            loop.call_later(order.pause_s * number / order.callers, again, every[-1])
        await asyncio.sleep(ends - time.perf_counter())
        _close(every)

    async def _connected(self, ask: HttpAsk | SocketAsk, answered: "Answered") -> "_Connection":
        made = _SocketConnection(ask, answered) if isinstance(ask, SocketAsk) else _Connection(ask, answered)
        await asyncio.get_running_loop().create_connection(lambda: made, *self._address)
        await made.ready
        return made

    async def _opened(self, ask: HttpAsk) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        writer.write(request_of(ask))
        await writer.drain()
        return reader, writer


class _Connection(asyncio.Protocol):
    """Sends the request again and again, when it is told to. ``status``, ``retry_s``, ``text``: of the last answer."""

    expected = 200

    def __init__(self, ask: HttpAsk, answered: "Answered") -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.expected = ask.status
        self._begin(request_of(ask), answered)

    def _begin(self, request: bytes, answered: "Answered") -> None:
        self._request, self._answered = request, answered
        self._received, self._missing = b"", 0
        self._since: float | None = None
        self.is_open = True
        self.status, self.retry_s, self.text = ENDED, 0.0, ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.ready.set_result(None)

    def send(self) -> None:
        self._since = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        elif not self._read_head(data):
            return
        if self._missing == 0:
            self._end()

    def _read_head(self, data: bytes) -> bool:
        """Returns whether the head is complete. An answer without a length ends the connection."""
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        head, length = self._received[: end + 2], _LENGTH.search(self._received, 0, end + 2)
        if length is None:
            self.transport.abort()
            return False
        self.status = int(head[9:12])
        if self.status != self.expected:
            self.text = self._received[:1000].decode("latin-1")
            retry = _RETRY_AFTER.search(head)
            self.retry_s = float(retry[1]) if retry else 0.0
            if b"\r\nconnection: close" in head.lower():
                self.is_open = False
                self.transport.close()
        self._missing = end + 4 + int(length[1]) - len(self._received)
        self._received = b""
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self.ready.done():
            self.ready.set_exception(UnexpectedAnswer(f"The connection was closed before the first call: {exc}"))
        if self._since is not None:
            self.status, self.text = ENDED, f"The connection was closed before the answer: {exc}"
            self._end()

    def _end(self) -> None:
        if self._since is not None:
            took_s, self._since = time.perf_counter() - self._since, None
            self._answered(self, took_s)


class _SocketConnection(_Connection):
    """A WebSocket. The mask of its frames is 0, so that they are the message itself."""

    def __init__(self, ask: SocketAsk, answered: "Answered") -> None:
        assert len(ask.message) <= _MOST_BYTES
        self.ready = asyncio.get_running_loop().create_future()
        self._begin(bytes((_TEXT, _MASKED | len(ask.message))) + bytes(4) + ask.message, answered)
        self._path, self._last = ask.path, ask.last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(_UPGRADE.format(self._path).encode())

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.ready.done():
            if not self._received.startswith(b"HTTP/1.1 101 "[: len(self._received)]):
                self.ready.set_exception(UnexpectedAnswer(self._received[:1000].decode("latin-1")))
            elif self._received.endswith(b"\r\n\r\n"):
                self._received = b""
                self.ready.set_result(None)
        elif self._last in self._received:
            self.status, self._received = 200, b""
            self._end()
        elif b'"event":"error"' in self._received:
            self.status, self.text = ENDED, self._received[:1000].decode("latin-1")
            self._end()


Answered = Callable[[_Connection, float], None]
"""Called with the connection and the seconds that the answer took."""
Ask = Callable[[_Connection], None]


def _close(connections: Sequence[_Connection]) -> None:
    for each in connections:
        each.transport.abort()
