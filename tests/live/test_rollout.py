"""Rollout: keep-alive clients move to the new gateway without failed requests; a drain answers uploads and streams."""

import asyncio
import json
import signal
import socket
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest

from tests.toolkit.connections import Connection, dialed, post, rest
from tests.toolkit.listener import read_answer
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway
from tests.toolkit.programs import RedisServer
from tests.toolkit.waiting import eventually
from tests.toolkit.websocket_client import script

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


LONG, SHORT = script(outputs=1000, interval_s=0.2).encode(), script(outputs=2).encode()
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The gateway sends it before it reads the body, and admits the request before that."""


class Upload:
    """A POST over its own socket, which the gateway has admitted when the constructor returns.

    The constructor sends the first half of the body, ``finish`` the second half.
    """

    def __init__(self, gateway: GatewayProcess, path: str, body: bytes) -> None:
        self._socket = dialed(gateway)
        self._rest = body[len(body) // 2 :]
        self._socket.sendall(post(path, b"", "Expect: 100-continue", size=len(body)))
        assert self._socket.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        self._socket.sendall(body[: len(body) // 2])

    def finish(self) -> None:
        self._socket.sendall(self._rest)

    def answer(self) -> str:
        return rest(self._socket).decode()


def test_every_upload_and_stream_of_two_workers_gets_its_answer(
    start_gateway: StartGateway, redis: RedisServer
) -> None:
    draining = start_gateway(config=CONFIG, drain_s="4", workers="2", redis_url=redis.url)
    running = [Upload(draining, "/v1/pipelines/scripted_patient/stream", LONG) for _ in range(6)]
    for each in running:
        each.finish()
    completed = [Upload(draining, "/v1/pipelines/scripted_stream/stream", SHORT) for _ in range(6)]
    resumable = json.dumps({"pipeline": "scripted_stream", "inputs": json.loads(SHORT)}).encode()
    unfinished = [Upload(draining, "/v1/pipelines/scripted", SHORT) for _ in range(4)]
    unfinished += [Upload(draining, "/v1/pipelines/scripted_patient/stream", LONG) for _ in range(4)]
    unfinished += [Upload(draining, "/v1/streams", resumable) for _ in range(4)]
    eventually(lambda: draining.metric("active_streams") == 6)
    draining.process.send_signal(signal.SIGTERM)
    ready = f"{draining.url}/health/ready"
    eventually(lambda: {httpx.get(ready).json()["status"] for _ in range(16)} == {"draining"})
    for each in completed:
        each.finish()
    for path in ("/v1/pipelines/scripted", "/v1/pipelines/scripted_stream/stream", "/v1/streams"):
        refused = httpx.post(f"{draining.url}{path}", json=json.loads(SHORT))
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
    for text in (each.answer() for each in running):
        assert text.startswith("HTTP/1.1 200")
        assert text.count("event: error") == 1
        assert '"code":"draining"' in text
    for text in (each.answer() for each in completed):
        assert text.startswith("HTTP/1.1 200")
        assert text.count("event: done") == 1
    for text in (each.answer() for each in unfinished):
        assert text.startswith("HTTP/1.1 503")
        assert '"code":"draining"' in text
    assert draining.process.wait(20) == 0
    messages = [json.loads(line)["message"] for line in draining.log.splitlines()]
    assert any(each.startswith("draining") for each in messages)
