"""Errors that another replica would not give: they close the client's connection, so that its next one may reach it.

``pytest tests/live/test_other_replicas.py --log-cli-level=info`` shows what clients of two gateways see.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from app.launcher.launch import EmbeddedOptions
from app.launcher.server import EmbeddedTriton
from tests.toolkit.processes import GatewayProcess, running_gateway, running_triton, scripted_models

_log = logging.getLogger(__name__)

CONFIG = """
pipelines:
  words:
    model: scripted_stream
    inputs: {script: {tensor: SCRIPT, kind: text}}
    outputs: {text: {tensor: TEXT, kind: text}}
    stream: {progress_s: 20, timeout_s: 60}
    openai: {completions: {prompt: script}}
oip: {models: [scripted_stream]}
"""
SCRIPT = '{"outputs": 1}'
ENDLESS = '{"outputs": 1000, "interval_s": 0.1}'
CLIENTS = 4
PROBE_S = 0.5
"""The period of the readiness probe of the stand-in for a Service."""
WITHIN_S = 2.0
"""No client sees an error later than this after the probe failed."""
AFTER_S = WITHIN_S + 1.0
"""How long the clients go on after the probe failed."""
DOWN_S = 60.0
"""The probe fails within this time."""


def openai(script: str, *, stream: bool) -> dict[str, object]:
    return {"model": "words", "prompt": script, "stream": stream}


UNARY: dict[str, tuple[str, object]] = {
    "pipelines": ("/v1/pipelines/words", {"script": SCRIPT}),
    "openai": ("/v1/completions", openai(SCRIPT, stream=False)),
    "oip": ("/v2/models/scripted_stream/generate", {"SCRIPT": SCRIPT}),
}
STREAMS: dict[str, tuple[str, object]] = {
    "pipelines": ("/v1/pipelines/words/stream", {"script": ENDLESS}),
    "openai": ("/v1/completions", openai(ENDLESS, stream=True)),
    "oip": ("/v2/models/scripted_stream/generate_stream", {"SCRIPT": ENDLESS}),
}


class Connection:
    """One connection to a gateway, which stays open as long as the gateway keeps it."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((str(address.hostname), int(address.port or 0)), 10)

    def send(self, path: str, body: object = None) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        self._socket.sendall(head.encode() + text)

    def received(self, until: bytes) -> str:
        """Returns what arrives up to ``until``."""
        data = b""
        while until not in data:
            part = self._socket.recv(65536)
            assert part, data
            data += part
        return data.decode()

    def close(self) -> None:
        self._socket.close()

    def rest(self) -> str:
        """Returns what arrives until the gateway closes the connection."""
        with self._socket:
            data = b""
            with suppress(TimeoutError):
                while part := self._socket.recv(65536):
                    data += part
                return data.decode()
        raise AssertionError(f"the connection stays open after {data[-500:].decode()}")


def kill(triton: EmbeddedTriton) -> None:
    os.kill(triton.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Replica:
    gateway: GatewayProcess
    triton: EmbeddedTriton


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[list[Replica]]:
    """Two gateways, each with a Triton of its own, which is not started again: tests kill the first, then the other."""
    folder = tmp_path_factory.mktemp("replicas")
    config = folder / "gateway.yaml"
    config.write_text(CONFIG)
    repository = scripted_models(folder / "models")
    with ExitStack() as stack:
        found = []
        for number in range(2):
            triton = stack.enter_context(running_triton(EmbeddedOptions(repository, models_venv)))
            settings = {"triton_url": triton.grpc_url, "config": str(config)}
            gateway = stack.enter_context(running_gateway(folder / str(number), **settings))
            found.append(Replica(gateway, triton))
        yield found


def test_other_errors_keep_the_connection(replicas: list[Replica]) -> None:
    connection = Connection(replicas[0].gateway.url)
    answers = []
    for path, body, status in (
        ("/v1/pipelines/words", {}, 422),
        ("/v1/pipelines/words", {"script": '{"raise": "scripted"}'}, 502),
        ("/v1/pipelines/unknown", {}, 404),
        ("/v1/pipelines/words", {"script": SCRIPT}, 200),
    ):
        connection.send(path, body)
        answers.append((connection.received(b"}").split(" ")[1], str(status)))
    connection.close()
    assert [found for found, _ in answers] == [expected for _, expected in answers]


@dataclass
class Service:
    """Distributes new connections over the gateways whose readiness probe passes, and counts what clients see."""

    replicas: list[Replica]
    ready: list[Replica] = field(default_factory=list)
    connections: int = 0
    total: int = 0
    errors_at: list[float] = field(default_factory=list)
    not_ready_at: float = 0.0
    ends_at: float = float("inf")

    async def probe(self) -> None:
        async with httpx.AsyncClient() as client:
            while time.monotonic() < self.ends_at:
                answers = [await client.get(f"{each.gateway.admin_url}/health/ready") for each in self.replicas]
                self.ready = [
                    each for each, answer in zip(self.replicas, answers, strict=True) if answer.status_code == 200
                ]
                if len(self.ready) < len(self.replicas) and not self.not_ready_at:
                    self.not_ready_at = time.monotonic()
                    self.ends_at = self.not_ready_at + AFTER_S
                await asyncio.sleep(PROBE_S)

    async def client(self) -> None:
        """Sends requests over a connection until it is closed, then over a new one."""
        while time.monotonic() < self.ends_at:
            self.connections += 1
            address = urlsplit(self.ready[self.connections % len(self.ready)].gateway.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            while time.monotonic() < self.ends_at and await self.is_kept(reader, writer):
                await asyncio.sleep(0.02)
            writer.close()

    async def is_kept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Sends a request. Returns whether the connection stays open after the answer."""
        body = json.dumps(UNARY["pipelines"][1]).encode()
        head = b"POST /v1/pipelines/words HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(answer.split(b"content-length: ")[1].split(b"\r\n")[0]))
        self.total += 1
        if not answer.startswith(b"http/1.1 200"):
            self.errors_at.append(time.monotonic())
        return b"\r\nconnection: close" not in answer


async def test_kept_connections_leave_a_replica_without_triton(replicas: list[Replica]) -> None:
    service = Service(replicas, ready=list(replicas))
    tasks = [asyncio.create_task(service.probe())]
    tasks += [asyncio.create_task(service.client()) for _ in range(CLIENTS)]
    await asyncio.sleep(1.0)
    kill(replicas[0].triton)
    service.ends_at = time.monotonic() + DOWN_S
    await asyncio.gather(*tasks)
    assert service.not_ready_at
    later = [at - service.not_ready_at for at in service.errors_at if at > service.not_ready_at]
    figures = len(service.errors_at), service.total, len(later), max(later, default=0.0)
    _log.info("%d errors in %d requests; %d after the probe failed, the last %.2f s after it", *figures)
    assert max(later, default=0.0) < WITHIN_S


def test_every_dialect_closes_the_connection_with_the_error(replicas: list[Replica]) -> None:
    """Kills the other Triton, so no later test can use the replicas."""
    gateway, triton = replicas[1].gateway, replicas[1].triton
    streams = {name: Connection(gateway.url) for name in (*STREAMS, "resumable")}
    for name, (path, body) in STREAMS.items():
        streams[name].send(path, body)
    started = httpx.post(f"{gateway.url}/v1/streams", json={"pipeline": "words", "inputs": {"script": ENDLESS}})
    streams["resumable"].send(started.headers["location"])
    for connection in streams.values():
        assert connection.received(b"word").startswith("HTTP/1.1 200")
    kill(triton)
    for name, connection in streams.items():
        assert "error" in connection.rest(), name
    for name, (path, body) in {**UNARY, **{f"{name} stream": each for name, each in STREAMS.items()}}.items():
        connection = Connection(gateway.url)
        connection.send(path, body)
        answer = connection.rest().lower()
        assert answer.startswith("http/1.1 503"), name
        assert answer.count("\r\nconnection: close\r\n") == 1, name
