"""WebSockets of stateful models: each one is a session, whose steps are its messages."""

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.launcher.embedded_triton import EmbeddedTriton
from tests.live.session_models import MODELS
from tests.live.sessions import code, sessions_gateway, sessions_triton, step
from tests.toolkit.processes import GatewayProcess
from tests.toolkit.waiting import eventually
from tests.toolkit.websocket_client import events_of, opened

PIPELINES: dict[str, Any] = {
    **{
        name: {"model": name, "session": True}
        for name in ("text_direct", "uint64_oldest", "int64_oldest", "int32_oldest", "short")
    },
    "few": {"model": "uint64_direct", "session": {"max_open": 2}},
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, models_venv: Path) -> Iterator[EmbeddedTriton]:
    models = {pipeline["model"] for pipeline in PIPELINES.values()}
    with sessions_triton(tmp_path_factory.mktemp("sessions"), models_venv, models) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with sessions_gateway(triton, tmp_path_factory.mktemp("gateway"), PIPELINES) as process:
        yield process


async def run_session(gateway: GatewayProcess, pipeline: str, seed: int) -> None:
    """Sends all steps at once: they run in order. A message that is no step changes no state."""
    values = random.Random(seed).choices(range(1000), k=10)
    async with opened(gateway, pipeline) as client:
        await client.send('{"NUMBER": "five"}')
        for value in values:
            await client.send(json.dumps({"NUMBER": value}))
        ((name, problem),) = await events_of(client, 1)
        assert (name, problem["code"]) == ("error", "invalid_input")
        for number, total in enumerate(accumulate(values), 1):
            (_, answer), _ = await events_of(client, number + 1)
            assert (answer["SUM"], answer["STEPS"]) == (total, number)


@pytest.mark.parametrize("pipeline", ["text_direct", "uint64_oldest"])
async def test_each_websocket_has_its_own_state(gateway: GatewayProcess, pipeline: str) -> None:
    await asyncio.gather(*[run_session(gateway, pipeline, seed) for seed in range(MODELS[pipeline].places)])
    await asyncio.to_thread(eventually, lambda: gateway.metric("open_sessions") == 0)


async def test_without_a_free_place_the_handshake_is_refused(gateway: GatewayProcess) -> None:
    """The place of a session without a step is free at once."""
    clients = [await opened(gateway, "few") for _ in range(2)]
    with pytest.raises(InvalidStatus) as refused:
        await opened(gateway, "few")
    assert refused.value.response.status_code == 429
    await asyncio.gather(*[client.close() for client in clients])
    await asyncio.to_thread(eventually, lambda: gateway.metric("open_sessions") == 0)
    async with opened(gateway, "few") as client:
        assert (await step(client, 1, 1))["SUM"] == 1


async def test_a_session_that_expires_ends_its_idle_websocket(gateway: GatewayProcess) -> None:
    async with opened(gateway, "short") as client:
        await step(client, 1, 1)
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert gateway.metric("open_sessions", pipeline="short") == 0
        assert (client.close_code, client.close_reason) == (4404, "unknown_session")


async def test_a_step_goes_on_when_its_client_leaves(gateway: GatewayProcess) -> None:
    before = gateway.metric("sessions_total", pipeline="int32_oldest", reason="lost")
    client = await opened(gateway, "int32_oldest")
    await client.send(json.dumps({"NUMBER": 1, "SLEEP": 0.5}))
    await asyncio.to_thread(eventually, lambda: gateway.metric("requests_running") == 1)
    client.transport.abort()
    await asyncio.to_thread(eventually, lambda: gateway.metric("open_sessions") == 0)
    await asyncio.to_thread(eventually, lambda: gateway.metric("requests_running") == 0)
    assert gateway.metric("sessions_total", pipeline="int32_oldest", reason="lost") == before


async def test_the_drain_waits_for_sessions(triton: EmbeddedTriton, tmp_path: Path) -> None:
    """One over a WebSocket, which ends first, and one over HTTP."""
    with sessions_gateway(triton, tmp_path, PIPELINES, drain_s="60") as draining:
        async with httpx.AsyncClient(base_url=draining.url, timeout=60) as http:
            async with opened(draining, "int64_oldest") as client:
                await step(client, 1, 1)
                url = (await http.post("/v1/pipelines/int64_oldest/sessions")).headers["Location"]
                draining.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(eventually, lambda: readiness(draining) == "draining")
                assert code(await http.post("/v1/pipelines/int64_oldest/sessions")) == (503, "draining")
                assert (await step(client, 2, 1))["SUM"] == 2
            last = await http.post(url, json={"NUMBER": 7}, headers={"X-Session-End": "true"})
            assert last.json()["SUM"] == 7
        draining.process.wait(60)


def readiness(gateway: GatewayProcess) -> str:
    return str(httpx.get(f"{gateway.url}/health/ready").json()["status"])
