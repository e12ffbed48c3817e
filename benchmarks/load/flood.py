"""Load above the capacity: callers that ignore ``Retry-After`` and callers that obey it."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import cast

from benchmarks.load.orders import Answers, Flood, HttpAsk, Obedient, request_of

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_MOST_CONNECTIONS = 4000
ENDED = 0
"""Stands for the status of a request whose connection was closed without an answer."""


class _Connection(asyncio.Protocol):
    """Asks once, and tells ``answered`` the status, the seconds that the answer took, and ``Retry-After``."""

    def __init__(self, answered: "Callable[[_Connection, int, float, float], None]") -> None:
        self._answered = answered
        self._received = b""
        self._since: float | None = None
        self.is_open = True

    @property
    def is_waiting(self) -> bool:
        return self._since is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> None:
        self._since = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        length = _LENGTH.search(self._received, 0, end + 2) if end >= 0 else None
        if length is None or len(self._received) < end + 4 + int(length[1]):
            return
        head, self._received = self._received[: end + 2], b""
        retry = _RETRY_AFTER.search(head)
        if b"\r\nconnection: close" in head.lower():
            self.is_open = False
            self.transport.close()
        self._end(int(head[9:12]), float(retry[1]) if retry else 0.0)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end(ENDED, 0.0)

    def _end(self, status: int, retry_s: float) -> None:
        if self._since is not None:
            took_s, self._since = time.perf_counter() - self._since, None
            self._answered(self, status, took_s, retry_s)


class Ledger:
    """The answers in the measured time."""

    def __init__(self, warm_up_s: float, seconds: float) -> None:
        self.starts = time.perf_counter() + warm_up_s
        self.ends = self.starts + seconds
        self._asked = 0
        self._statuses = Counter[int]()
        self._good_s: list[float] = []
        self._refused_s: list[float] = []

    def ask(self) -> None:
        self._asked += self.starts <= time.perf_counter() < self.ends

    def add(self, status: int, took_s: float) -> None:
        if self.starts <= time.perf_counter() < self.ends:
            self._statuses[status] += 1
            if status in (200, 201):
                self._good_s.append(took_s)
            elif status == 429:
                self._refused_s.append(took_s)

    @property
    def answers(self) -> Answers:
        seconds = self.ends - self.starts
        return Answers(self._asked, seconds, dict(self._statuses), tuple(self._good_s), tuple(self._refused_s))


async def paced(order: Flood, ends: float, ask: Callable[[], None]) -> None:
    """Calls ``ask`` at the rate of the order until ``ends``."""
    begun, asked = time.perf_counter(), 0
    while (now := time.perf_counter()) < ends:
        for _ in range(int((now - begun) * order.rate) - asked):
            asked += 1
            ask()
        await asyncio.sleep(order.tick_s)


async def flooded(host: str, port: int, order: Flood) -> Answers:
    """Sends requests at a steady rate, regardless of the answers."""
    loop, ledger = asyncio.get_running_loop(), Ledger(order.warm_up_s, order.seconds)
    request = request_of(cast("HttpAsk", order.ask))
    idle: list[_Connection] = []
    every: list[_Connection] = []

    def answered(connection: _Connection, status: int, took_s: float, _retry_s: float) -> None:
        ledger.add(status, took_s)
        if connection.is_open:
            idle.append(connection)

    async def ask_new() -> None:
        _, connection = await loop.create_connection(lambda: _Connection(answered), host, port)
        every.append(connection)
        connection.ask(request)

    opening = set[asyncio.Task[None]]()

    def ask() -> None:
        ledger.ask()
        while idle and not idle[-1].is_open:
            idle.pop()
        if idle:
            idle.pop().ask(request)
        elif len(every) + len(opening) < _MOST_CONNECTIONS:
            task = asyncio.create_task(ask_new())
            opening.add(task)
            task.add_done_callback(opening.discard)

    await paced(order, ledger.ends, ask)
    while any(each.is_waiting for each in every) and time.perf_counter() < ledger.ends + order.drain_s:
        await asyncio.sleep(order.tick_s)
    _close(every)
    return ledger.answers


async def obeyed(host: str, port: int, order: Obedient) -> Answers:
    """Runs callers that each send ``rate`` requests per second, and wait for the retry time of a refusal."""
    loop, request, ledger = asyncio.get_running_loop(), request_of(order.ask), Ledger(order.warm_up_s, order.seconds)
    every: list[_Connection] = []

    def answered(connection: _Connection, status: int, took_s: float, retry_s: float) -> None:
        ledger.add(status, took_s)
        wait_s = retry_s if order.obeys and status == 429 else max(order.pause_s - took_s, 0.0)
        loop.call_later(wait_s, ask, connection)

    def ask(connection: _Connection) -> None:
        if time.perf_counter() < ledger.ends and connection.is_open:
            ledger.ask()
            connection.ask(request)

    for number in range(order.callers):
        _, connection = await loop.create_connection(lambda: _Connection(answered), host, port)
        every.append(connection)
        loop.call_later(order.pause_s * number / order.callers, ask, connection)
    await asyncio.sleep(ledger.ends - time.perf_counter())
    _close(every)
    return ledger.answers


def _close(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.transport.abort()
