"""A load process: `python -m benchmarks.load http|grpc HOST:PORT DESCRIPTOR`.

It receives orders (``orders.py``) from the benchmark over an inherited pipe, one at a time.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import uvloop

from benchmarks.load.orders import Answers, Ask, Drop, Flood, Hold, Obedient, Order, Relay, Report, Unary

ORDER_S = 60.0
OPENED_TOGETHER = 50
"""Streams that are opened at a time."""


class Client(Protocol):
    """One implementation for each protocol."""

    async def unary(self, asks: Sequence[Any], seconds: float) -> Report: ...

    async def read_stream(self, ask: Any, read: Callable[[int], None]) -> None:
        """Reads one stream to its end. Calls ``read`` after each read with the number of its events."""

    async def above_capacity(self, order: Flood | Obedient) -> Answers: ...

    async def hold(self, ask: Any) -> Callable[[], None]:
        """Opens a stream, which stays open until the returned function is called."""


class Worker:
    """Carries out orders by a client, and keeps the streams that are held."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._held: list[Callable[[], None]] = []

    async def perform(self, order: Order) -> Report | Answers:
        """Raises TimeoutError if the order takes longer than ``ORDER_S``."""
        async with asyncio.timeout(ORDER_S):
            match order:
                case Unary():
                    return await self._client.unary(order.asks, order.seconds)
                case Relay():
                    return await self._relay(order)
                case Flood() | Obedient():
                    return await self._client.above_capacity(order)
                case Hold():
                    for start in range(0, order.streams, OPENED_TOGETHER):
                        count = min(OPENED_TOGETHER, order.streams - start)
                        self._held += await asyncio.gather(*(self._client.hold(order.ask) for _ in range(count)))
                case Drop():
                    for close in self._held:
                        close()
                    self._held.clear()
        return Report(count=len(self._held))

    async def _relay(self, order: Relay) -> Report:
        start = time.perf_counter()
        firsts_s: list[float] = []
        events, longest_s = 0, 0.0

        async def reader(number: int, ask: Ask) -> None:
            await asyncio.sleep(order.starts_s * number / len(order.asks))
            while (opened := time.perf_counter()) < start + order.seconds:
                reads, last = 0, opened

                def read(new: int) -> None:
                    nonlocal reads, last, events, longest_s
                    now = time.perf_counter()
                    if new and not reads:
                        firsts_s.append(now - opened)
                    if reads > 50:
                        longest_s = max(longest_s, now - last)
                    reads, last, events = reads + bool(new), now, events + new

                await self._client.read_stream(ask, read)

        await asyncio.gather(*(reader(number, ask) for number, ask in enumerate(order.asks)))
        return Report(events, time.perf_counter() - start, tuple(firsts_s), longest_s)


async def _client(kind: str, host: str, port: int) -> Client:
    """Imports only the libraries of the given kind, because others would affect memory and garbage collection."""
    if kind == "http":
        from benchmarks.load.http import HttpClient  # noqa: PLC0415

        return HttpClient(host, port)
    from benchmarks.load.grpc import GrpcClient  # noqa: PLC0415

    client = GrpcClient(f"{host}:{port}")
    await client.connect()
    return client


def main() -> None:
    kind, address, descriptor = sys.argv[1:]
    host, port = address.rsplit(":", 1)
    loop = uvloop.new_event_loop()
    with Connection(int(descriptor)) as benchmark:
        worker = Worker(loop.run_until_complete(_client(kind, host, int(port))))
        while (order := benchmark.recv()) is not None:
            try:
                report = loop.run_until_complete(worker.perform(order))
            except Exception as exc:
                report = exc
            benchmark.send(report)


if __name__ == "__main__":
    main()
