"""A client that carries out orders; one implementation for each protocol."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.load.orders import Answers, Ask, Drop, Each, Flood, Hold, Obedient, Order, Relay, Report, Unary

ORDER_S = 60.0
OPENED_TOGETHER = 50
"""Streams that are opened at a time."""


class Client(Protocol):
    async def unary(self, asks: Sequence[Ask], seconds: float) -> Report:
        """Calls for ``seconds``, at any time one for each of ``asks``."""

    async def read_stream(self, ask: Ask) -> int:
        """Reads one stream to its end and returns the number of its events."""

    async def above_capacity(self, order: Flood | Obedient) -> Answers: ...

    async def hold(self, ask: Ask) -> Callable[[], None]:
        """Opens a stream, which stays open until the returned function is called."""


class Worker:
    """Carries out orders by a client, and keeps the streams that are held."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._held: list[Callable[[], None]] = []

    async def perform(self, order: Order) -> Report | Answers:
        """Raises TimeoutError if the order takes longer than ``ORDER_S``."""
        async with asyncio.timeout(ORDER_S):
            return await self._perform(order)

    async def _perform(self, order: Order) -> Report | Answers:
        match order:
            case Unary():
                return await self._client.unary([order.ask] * order.connections, order.seconds)
            case Each():
                return await self._client.unary(order.asks, order.seconds)
            case Relay():
                return await self._relay(order)
            case Flood() | Obedient():
                return await self._client.above_capacity(order)
            case Hold():
                await self._hold(order)
            case Drop():
                for close in self._held:
                    close()
                self._held.clear()
        return Report(count=len(self._held))

    async def _hold(self, order: Hold) -> None:
        for start in range(0, order.streams, OPENED_TOGETHER):
            count = min(OPENED_TOGETHER, order.streams - start)
            self._held += await asyncio.gather(*(self._client.hold(order.ask) for _ in range(count)))

    async def _relay(self, order: Relay) -> Report:
        start, count = time.perf_counter(), 0
        while time.perf_counter() < start + order.seconds:
            count += await self._client.read_stream(order.ask)
        return Report(count, time.perf_counter() - start)
