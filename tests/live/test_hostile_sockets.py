"""Hostile WebSockets: each is bounded, and closed with the code that says why."""

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway, live_gateway
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    RawSocket,
    frame,
    script,
)

MIB = 1024 * 1024
GROWTH = 24 * MIB
IDLE, IDLE_BYTES = 5000, 32 * 1024
"""Idle WebSockets, and the limit for the memory of each."""
CONFIG = str(LIVE / "gateway.yaml")
PIPELINE = "scripted_patient"


hostile = live_gateway(
    Path(CONFIG).read_text(), ping_s="1", send_timeout_s="1", max_body_bytes=str(4 * MIB), drain_s="1"
)


def memory(gateway: GatewayProcess) -> int:
    return psutil.Process(gateway.process.pid).memory_info().rss


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        pytest.param([frame(TEXT, b"{}", masked=False)], 1002, id="without a mask"),
        pytest.param([frame(3, b"{}")], 1002, id="unknown opcode"),
        pytest.param([frame(CONTINUATION, b"{}")], 1002, id="continuation of nothing"),
        pytest.param([frame(TEXT, b"{", fin=False), frame(TEXT, b"}")], 1002, id="two messages at once"),
        pytest.param([bytes([0xC1]) + frame(TEXT, b"{}")[1:]], 1002, id="compressed without being negotiated"),
        pytest.param([frame(PING, bytes(126))], 1002, id="large control frame"),
        pytest.param([frame(PING, b"", fin=False)], 1002, id="control frame in fragments"),
        pytest.param([frame(CLOSE, b"\0")], 1002, id="close frame that is too short"),
        pytest.param([frame(CLOSE, (1005).to_bytes(2))], 1002, id="close code that is not allowed"),
        pytest.param([frame(TEXT, b"{", fin=False), frame(CLOSE, (1001).to_bytes(2))], 1001, id="between fragments"),
        pytest.param([frame(TEXT, b'{"script": "\xff"}')], 1007, id="text that is not UTF-8"),
        pytest.param([frame(TEXT, b"\xc3", fin=False), frame(CONTINUATION, b"(")], 1007, id="not UTF-8 in fragments"),
        pytest.param([frame(BINARY, length=100 * MIB)], 1009, id="100 MB declared"),
        pytest.param([frame(BINARY, length=2**63)], 1009, id="2^63 bytes declared"),
        pytest.param(
            [frame(BINARY, bytes(3 * MIB), fin=False), frame(CONTINUATION, length=2 * MIB)], 1009, id="in fragments"
        ),
        pytest.param([frame(TEXT, b"", fin=False), frame(CONTINUATION, fin=False) * 20_000], 1008, id="fragments"),
        pytest.param([frame(PING, b"x" * 100) * 1000], 1008, id="pings"),
        pytest.param([frame(PONG) * 1000], 1008, id="pongs"),
    ],
)
def test_wrong_frames(hostile: GatewayProcess, frames: list[bytes], code: int) -> None:
    with RawSocket(hostile, PIPELINE) as client:
        client.send(*frames)
        assert client.close_code()[0] == code


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(lambda: frame(PING, b"x" * 125) * 100, id="pings"),
        pytest.param(lambda: frame(TEXT, script(outputs=1000, bytes=10_000).encode()), id="requests"),
    ],
)
def test_a_client_that_reads_nothing(hostile: GatewayProcess, flood: Callable[[], bytes]) -> None:
    before, memory_before = hostile.metric("websockets_total"), memory(hostile)
    with RawSocket(hostile, PIPELINE, receive_bytes=4096) as client:
        client.connection.settimeout(0.2)
        for _ in range(200):
            try:
                client.send(flood())
            except OSError:
                break
        eventually(lambda: hostile.metric("websockets_total") == before + 1)
        assert memory(hostile) - memory_before < GROWTH


def test_a_slow_consumer_gets_its_code(start_gateway: StartGateway) -> None:
    gateway = start_gateway(config=CONFIG, send_timeout_s="20")
    with RawSocket(gateway, PIPELINE, receive_bytes=4096) as client:
        client.send(frame(TEXT, script(outputs=1_000, bytes=30_000).encode()))
        eventually(lambda: gateway.metric("requests_total", transport="websocket", outcome="cancelled") == 1)
        assert client.close_code() == (1008, "slow_consumer")
    eventually(lambda: gateway.metric("websockets_total", reason="slow_consumer") == 1)


async def test_a_peer_that_does_not_answer_pings(hostile: GatewayProcess) -> None:
    with RawSocket(hostile, PIPELINE) as client:
        assert await asyncio.to_thread(client.close_code) == (1011, "ping_timeout")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_five_thousand_idle_websockets(start_gateway: StartGateway) -> None:
    """They leave room for other requests, and the drain closes them all."""
    gateway = start_gateway(config=CONFIG, ping_s="600", max_connections=str(IDLE + 100), drain_s="30")
    before = memory(gateway)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawSocket(gateway, PIPELINE)) for _ in range(IDLE)]
        assert gateway.metric("open_websockets", pipeline=PIPELINE) == IDLE
        assert memory(gateway) - before < IDLE * IDLE_BYTES
        answer = httpx.post(f"{gateway.url}/v1/pipelines/scripted", json={"script": json.dumps({"outputs": 1})})
        assert answer.status_code == 200, answer.text
        gateway.process.send_signal(signal.SIGTERM)
        assert {client.close_code() for client in clients} == {(1001, "draining")}
    gateway.process.wait(PATIENCE_S)
