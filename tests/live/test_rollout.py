"""Rollout: clients with keep-alive connections move from the old gateway to the new gateway without failed requests."""

import asyncio
import signal
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.toolkit.connections import Connection
from tests.toolkit.listener import read_answer
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway
from tests.toolkit.raw_http import post

CONFIG = str(LIVE / "gateway.yaml")
CLIENTS = 8
DELAY_S = 1.5
ENDPOINTS_S = 0.5
"""After this time, new connections reach only the new gateway, as after the removal of an endpoint of a Service."""
REQUEST = post("/v1/pipelines/scripted", {"script": '{"outputs": 1}'})


@dataclass
class Service:
    """Distributes new connections over the endpoints in turn, and counts the results of the clients.

    Attributes:
        results: statuses and names of exceptions.
    """

    endpoints: list[GatewayProcess]
    connections: int = 0
    is_rolled_out: bool = False
    results: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.results.total()

    async def client(self, requests: int) -> None:
        """Sends requests one after another until the old gateway has ended. Reuses a connection until it is closed."""
        connection = None
        while self.total < requests or not self.is_rolled_out:
            try:
                if connection is None:
                    self.connections += 1
                    connection = await Connection.to(self.endpoints[self.connections % len(self.endpoints)])
                connection.writer.write(REQUEST)
                head, _ = await read_answer(connection.reader)
            except (OSError, EOFError) as exc:
                self.results[type(exc).__name__] += 1
                connection = None
                continue
            self.results[head[9:12].decode()] += 1
            if b"\r\nconnection: close" in head:
                await connection.close()
                connection = None
        if connection is not None:
            await connection.close()


@pytest.mark.parametrize(("requests", "workers"), [(500, 1), pytest.param(10_000, 2, marks=pytest.mark.full)])
async def test_no_request_of_a_keep_alive_connection_fails(
    start_gateway: StartGateway, requests: int, workers: int
) -> None:
    settings = {"config": CONFIG, "shutdown_delay_s": str(DELAY_S), "workers": str(workers)}
    old, new = [await asyncio.to_thread(start_gateway, **settings) for _ in range(2)]
    service = Service([old, new])
    clients = [asyncio.create_task(service.client(requests)) for _ in range(CLIENTS)]
    while service.total < requests / 4:
        await asyncio.sleep(0.01)
    old.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(ENDPOINTS_S)
    service.endpoints.remove(old)
    assert await asyncio.to_thread(old.process.wait, 20) == 0
    service.is_rolled_out = True
    await asyncio.gather(*clients)
    assert set(service.results) == {"200"}
