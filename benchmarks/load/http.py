"""HTTP/1.1 and WebSockets on asyncio protocols: little work for each answer, so that only the servers are measured."""

import asyncio
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.load.flood import flooded, obeyed
from benchmarks.load.orders import Answers, Flood, HttpAsk, Obedient, Report, SocketAsk, UnexpectedAnswer, request_of

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNK_BYTES = 1 << 18
LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a body of unknown length."""
_UPGRADE = (
    "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_TEXT, _MASKED, _MOST_BYTES = 0x81, 0x80, 125
"""Of a WebSocket frame (RFC 6455, 5.2): a whole text message, its mask bit, the limit for a length of one byte."""


class HttpClient:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def unary(self, asks: Sequence[HttpAsk | SocketAsk], seconds: float) -> Report:
        run = _Run(len(asks))
        loop = asyncio.get_running_loop()
        for ask in asks:
            _, caller = await loop.create_connection(partial(_caller_of, run, ask), self._host, self._port)
            await caller.ready
            run.callers.append(caller)
        return await run.result(seconds)

    async def read_stream(self, ask: HttpAsk) -> int:
        reader, writer = await self._open(ask)
        events, tail = 0, b""
        try:
            while ask.end not in tail:
                chunk = b"" if tail.endswith(LAST_CHUNK) else await reader.read(CHUNK_BYTES)
                if not chunk:
                    raise UnexpectedAnswer(f"The stream ended unexpectedly: {tail!r}")
                overlap = tail[-(len(ask.event) - 1) :]
                events += (overlap + chunk).count(ask.event)
                tail = (tail + chunk)[-300:]
        finally:
            writer.transport.abort()
        return events

    async def above_capacity(self, order: Flood | Obedient) -> Answers:
        ask = flooded if isinstance(order, Flood) else obeyed
        return await ask(self._host, self._port, order)  # type: ignore[arg-type]

    async def hold(self, ask: HttpAsk) -> Callable[[], None]:
        reader, writer = await self._open(ask)
        await reader.readuntil(b"\r\n\r\n")

        def close() -> None:
            """Keeps the writer until then: one that is collected closes its connection."""
            writer.transport.abort()

        return close

    async def _open(self, ask: HttpAsk) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        writer.write(request_of(ask))
        await writer.drain()
        return reader, writer


class _Run:
    """The calls of one order."""

    def __init__(self, connections: int) -> None:
        self.ends = 0.0
        self.durations: list[float] = []
        self.callers: list[_Connection] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = connections

    async def result(self, seconds: float) -> Report:
        start = time.perf_counter()
        self.ends = start + seconds
        try:
            for caller in self.callers:
                caller.call()
            await self.done
        finally:
            for caller in self.callers:
                caller.close()
        return Report(len(self.durations), time.perf_counter() - start, tuple(self.durations))

    def ended(self) -> None:
        self._open -= 1
        if self._open == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, text: str) -> None:
        if not self.done.done():
            self.done.set_exception(UnexpectedAnswer(text))


class _Connection(asyncio.Protocol):
    """Calls again as soon as the answer is complete. ``ready``: when the first call may be made."""

    def __init__(self, run: _Run, request: bytes) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._request = request
        self._received = b""
        self._started = 0.0
        self._is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.ready.set_result(None)

    @abstractmethod
    def data_received(self, data: bytes) -> None: ...

    def call(self) -> None:
        self._is_waiting = True
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def _answered(self) -> None:
        now = time.perf_counter()
        self._run.durations.append(now - self._started)
        if now < self._run.ends:
            self.call()
        else:
            self._is_waiting = False
            self._run.ended()

    def close(self) -> None:
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(UnexpectedAnswer(f"The connection was closed before the first call: {exc}"))
        if self._is_waiting:
            self._run.fail(f"The connection was closed before the answer: {exc}")


class _Caller(_Connection):
    def __init__(self, run: _Run, ask: HttpAsk) -> None:
        super().__init__(run, request_of(ask))
        self._start_of_answer = b"HTTP/1.1 %d " % ask.status
        self._missing = 0

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        elif not self._read_head(data):
            return
        if self._missing == 0:
            self._answered()

    def _read_head(self, data: bytes) -> bool:
        """Returns whether the head is complete."""
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        length = _LENGTH.search(self._received, 0, end + 2)
        if length is None or not self._received.startswith(self._start_of_answer):
            self._run.fail(self._received[:1000].decode("latin-1"))
            return False
        self._missing = end + 4 + int(length[1]) - len(self._received)
        self._received = b""
        return True


class _SocketCaller(_Connection):
    """A WebSocket. The mask of its frames is 0, so that they are the message itself."""

    def __init__(self, run: _Run, ask: SocketAsk) -> None:
        assert len(ask.message) <= _MOST_BYTES
        super().__init__(run, bytes((_TEXT, _MASKED | len(ask.message))) + bytes(4) + ask.message)
        self._path = ask.path
        self._last = ask.last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(_UPGRADE.format(self._path).encode())

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.ready.done():
            self._read_upgrade()
        elif self._last in self._received:
            self._received = b""
            self._answered()
        elif b'"event":"error"' in self._received:
            self._run.fail(self._received[:1000].decode("latin-1"))

    def _read_upgrade(self) -> None:
        if not self._received.startswith(b"HTTP/1.1 101 "[: len(self._received)]):
            self.ready.set_exception(UnexpectedAnswer(self._received[:1000].decode("latin-1")))
        elif self._received.endswith(b"\r\n\r\n"):
            self._received = b""
            self.ready.set_result(None)


def _caller_of(run: _Run, ask: HttpAsk | SocketAsk) -> _Connection:
    return _SocketCaller(run, ask) if isinstance(ask, SocketAsk) else _Caller(run, ask)
