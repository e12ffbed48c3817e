"""HTTP/1.1 on asyncio protocols: little work for each answer, so that the servers are measured and not this client."""

import asyncio
import re
import time
from collections.abc import Callable

from benchmarks.load.flood import flooded, obeyed
from benchmarks.load.orders import Answers, Flood, HttpAsk, Obedient, Report, UnexpectedAnswer, request_of

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNK_BYTES = 1 << 18
LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a body of unknown length."""


class HttpClient:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def unary(self, ask: HttpAsk, connections: int, seconds: float) -> Report:
        run = _Run(request_of(ask), ask.status, connections)
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            _, caller = await loop.create_connection(lambda: _Caller(run), self._host, self._port)
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

    def __init__(self, request: bytes, status: int, connections: int) -> None:
        self.request = request
        self.start_of_answer = b"HTTP/1.1 %d " % status
        self.ends = 0.0
        self.durations: list[float] = []
        self.callers: list[_Caller] = []
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


class _Caller(asyncio.Protocol):
    """One connection. It calls again as soon as its answer is complete."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._head = b""
        self._missing = 0
        self._started = 0.0
        self._is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def call(self) -> None:
        self._is_waiting = True
        self._started = time.perf_counter()
        self._transport.write(self._run.request)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        elif not self._read_head(data):
            return
        if self._missing == 0:
            self._answered()

    def _read_head(self, data: bytes) -> bool:
        """Returns whether the head is complete."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return False
        length = _LENGTH.search(self._head, 0, end + 2)
        if length is None or not self._head.startswith(self._run.start_of_answer):
            self._run.fail(self._head[:1000].decode("latin-1"))
            return False
        self._missing = end + 4 + int(length[1]) - len(self._head)
        self._head = b""
        return True

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
        if self._is_waiting:
            self._run.fail(f"The connection was closed before the answer: {exc}")
