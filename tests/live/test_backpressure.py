"""A client that stops reading uses limited memory, and the gateway ends its stream and cancels the call to Triton."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.chaos.client import dechunked
from tests.toolkit.connections import dialed, post
from tests.toolkit.events import Event, checked, parsed
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway, linked_models, live_triton

KIB = 1024
GATEWAY_GROWTH = 4 * KIB * KIB
"""Growth of the gateway process during its first streams, independent of their number."""
SERVER_GROWTH = 8 * KIB * KIB
"""Growth of Triton per stream. Triton keeps sent responses, and the kernel buffers megabytes before a stream stalls."""
KEPT_BYTES = 256 * KIB * KIB
"""Triton may keep the responses of a few seconds, not those of the 60 s until the deadline."""
OUTPUT_BYTES = 32_000
ALL_BYTES_PER_S = 32_000_000
"""Total rate of all readers. A higher rate uses all of two cores, which changes the result of the test."""
PATH = "/v1/pipelines/scripted_patient/stream"


triton = live_triton(linked_models)  # cancelling streams at full rate can crash Triton 2.51


def request_stream(gateway: GatewayProcess, **script: Any) -> socket.socket:
    """Requests a stream over a connection with a small window."""
    connection = dialed(gateway, receive_bytes=16 * KIB)
    connection.sendall(post(PATH, {"script": json.dumps(script)}, "Connection: close"))
    return connection


async def test_a_reader_slower_than_the_model_gets_all_events(start_gateway: StartGateway) -> None:
    """8 MB at 4 MB/s take longer than the send timeout and fill every buffer."""
    gateway = start_gateway(config=str(LIVE / "gateway.yaml"), send_timeout_s="0.5")
    with request_stream(gateway, outputs=1, bytes=250 * OUTPUT_BYTES) as connection:
        events = await asyncio.to_thread(read_steadily, connection, 4_000_000)
    assert [event.name for event in events] == ["output", "done"]


async def test_a_reader_that_stays_behind_gets_slow_consumer(
    start_gateway: StartGateway, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """The reader reads steadily at 0.5 MB/s, the model writes at least 3 MB/s. Triton keeps the difference."""
    pipeline = yaml.safe_load((LIVE / "gateway.yaml").read_text())["pipelines"]["scripted_patient"]
    pipeline["stream"]["lag_s"] = 1.5
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump({"pipelines": {"scripted_patient": pipeline}}))
    gateway = start_gateway(config=str(tmp_path / "gateway.yaml"))
    server = psutil.Process(triton.pid)
    for size in (16_000, 100_000):
        before = server.memory_info().rss
        with request_stream(gateway, outputs=100_000, bytes=size, interval_s=0.004) as connection:
            events = await asyncio.to_thread(read_steadily, connection, 500_000)
        growth = server.memory_info().rss - before
        assert (events[-1].name, events[-1].data["code"]) == ("error", "slow_consumer"), size
        assert growth < KEPT_BYTES, size


def read_steadily(connection: socket.socket, bytes_per_s: int) -> list[Event]:
    answer = bytearray()
    started = time.monotonic()
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        chunk = connection.recv(64 * KIB)
        assert chunk, "the connection was closed"
        answer += chunk
        time.sleep(max(0.0, started + len(answer) / bytes_per_s - time.monotonic()))
    return checked(parsed(dechunked(bytes(answer).partition(b"\r\n\r\n")[2])[0].decode()))


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
async def test_stalled_readers_use_little_memory_and_are_dropped(
    start_gateway: StartGateway, triton: EmbeddedTriton, count: int
) -> None:
    gateway = start_gateway(config=str(LIVE / "gateway.yaml"), send_timeout_s="1")
    server = psutil.Process(triton.pid)
    process = psutil.Process(gateway.process.pid)
    before, server_before = process.memory_info().rss, server.memory_info().rss
    endless = {"outputs": 100_000, "bytes": OUTPUT_BYTES, "interval_s": count * OUTPUT_BYTES / ALL_BYTES_PER_S}
    readers = [request_stream(gateway, **endless) for _ in range(count)]
    peak = server_peak = 0
    try:
        for _ in range(2400):
            peak = max(peak, process.memory_info().rss)
            server_peak = max(server_peak, server.memory_info().rss)
            ended = gateway.metric("requests_total", pipeline="scripted_patient", outcome="cancelled")
            if ended == count:
                break
            await asyncio.sleep(0.05)
        assert ended == count
        assert (peak - before) / count < 256 * KIB + GATEWAY_GROWTH / count
        assert (server_peak - server_before) / count < SERVER_GROWTH
        assert gateway.metric("active_streams") == 0
    finally:
        for reader in readers:
            reader.close()
