"""The gateway with ``GATEWAY_GRPC=grpcio`` in front of the real Triton. All other live tests use asyncio."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.conftest import GatewayProcess, running_gateway
from tests.live.test_cancellation import leave_after
from tests.live.test_drain import CONFIG
from tests.toolkit.events import read_stream
from tests.toolkit.raw_http import post
from tests.toolkit.waiting import eventually


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    settings = {"triton_url": triton.grpc_url, "config": CONFIG, "grpc": "grpcio"}
    with running_gateway(tmp_path_factory.mktemp("transports"), **settings) as process:
        yield process


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=30) as session:
        yield session


def script(**fields: Any) -> dict[str, str]:
    return {"script": json.dumps(fields)}


def test_a_stream(client: httpx.Client) -> None:
    *outputs, last = read_stream(client, "scripted_stream", script(outputs=3))
    assert len(outputs) == 3
    assert (last.name, last.data["reason"]) == ("done", "complete")


@pytest.mark.parametrize(
    ("path", "fields", "until"),
    [
        ("/v1/pipelines/scripted_stream/stream", {"outputs": 50, "interval_s": 0.05}, b"id: 3"),
        ("/v1/pipelines/scripted", {"sleep_s": 4}, b""),
    ],
    ids=["stream", "unary"],
)
async def test_a_disconnect_cancels_the_call(
    gateway: GatewayProcess, tmp_path: Path, path: str, fields: dict[str, Any], until: bytes
) -> None:
    notice = tmp_path / "notice"
    request = post(path, script(**fields, notice=str(notice)))
    left = await leave_after(gateway, request, until, pause_s=0.1)
    await asyncio.to_thread(eventually, lambda: notice.exists() and bool(notice.read_text()))
    assert float(notice.read_text().split()[0]) >= left - 0.1
