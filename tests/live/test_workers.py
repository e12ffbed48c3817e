"""A gateway with two workers: connections, metrics, log, and a worker that dies under load."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from app.launcher.embedded_triton import EmbeddedTriton
from tests.toolkit.connections import CONNECTIONS, connections_to_each, deaths_of, load, workers_of
from tests.toolkit.processes import LIVE, GatewayProcess, StartGateway, running_gateway
from tests.toolkit.waiting import PATIENCE_S, eventually
from tests.toolkit.websocket_client import script

REQUESTS = 1_200
INVALID = b'{"script": 5}'
"""The gateway answers this body with 422, without a call to Triton."""
COUNTED = {"pipeline": "scripted", "transport": "unary", "outcome": "client_error"}


def has_all_workers(gateway: GatewayProcess) -> bool:
    """Also while a worker that is killed resets the question."""
    with suppress(httpx.TransportError):
        return dict(httpx.get(f"{gateway.admin_url}/health/ready").json()["workers"]) == {"1": "ready", "2": "ready"}
    return False


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "gateway.yaml"
    path.write_text((LIVE / "gateway.yaml").read_text())
    return path


@pytest.fixture(scope="module")
def settings(triton: EmbeddedTriton, config: Path) -> dict[str, str]:
    return {"workers": "2", "triton_url": triton.grpc_url, "config": str(config), "drain_s": "1"}


@pytest.fixture(scope="module")
def pair(settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with two workers. Tests may kill its workers, because the gateway replaces them."""
    with running_gateway(tmp_path_factory.mktemp("pair"), **settings) as gateway:
        yield gateway


async def test_clients_metrics_and_log_count_the_same_requests(pair: GatewayProcess) -> None:
    before, lines = counts(pair), lines_by_worker(pair)
    results = await load(pair, "/v1/pipelines/scripted", INVALID, requests=REQUESTS)
    assert (results.statuses, results.broken) == (Counter({422: REQUESTS}), 0)
    eventually(lambda: counts(pair)["all"] == before["all"] + REQUESTS)
    assert counts(pair) == {name: count + REQUESTS for name, count in before.items()}
    eventually(lambda: (lines_by_worker(pair) - lines).total() == REQUESTS)
    assert (lines_by_worker(pair) - lines).keys() == {1, 2}


def counts(gateway: GatewayProcess) -> dict[str, float]:
    """The number of all requests, and the number of the invalid ones by three metrics."""
    return {
        "all": gateway.metric("requests_total"),
        "invalid": gateway.metric("requests_total", **COUNTED),
        "durations": gateway.metric("request_duration_seconds_count", **COUNTED),
        "bucket": gateway.metric("request_duration_seconds_bucket", le="+Inf", **COUNTED),
    }


def lines_by_worker(gateway: GatewayProcess) -> Counter[object]:
    return Counter(line["worker"] for line in gateway.json_lines() if line.get("pipeline") == "scripted")


def test_each_worker_reloads_the_file(pair: GatewayProcess, config: Path) -> None:
    valid = config.read_text()
    config.write_text("pipelines: [")
    eventually(lambda: pair.metric("config_reload_failed") == 1)
    assert statuses(pair, "scripted") == {200}
    config.write_text(valid.replace("pipelines:\n", "pipelines:\n  added: {model: scripted}\n", 1))
    eventually(lambda: statuses(pair, "added") == {200})
    config.write_text(valid)
    eventually(lambda: statuses(pair, "added") == {404})
    eventually(lambda: pair.metric("config_reload_failed") == 0)


def test_workers_answer_while_their_parent_is_stopped(pair: GatewayProcess) -> None:
    os.kill(pair.process.pid, signal.SIGSTOP)
    try:
        for path in ("/v1/statistics", "/v1/pipelines", "/health/ready"):
            assert httpx.get(f"{pair.url}{path}", timeout=PATIENCE_S).status_code == 200
        assert pair.metric("triton_up") == 1
    finally:
        os.kill(pair.process.pid, signal.SIGCONT)


def statuses(gateway: GatewayProcess, pipeline: str) -> set[int]:
    """Sends requests over several connections, which the kernel distributes over both workers."""
    body = {"SCRIPT" if pipeline == "added" else "script": "{}"}
    one_each = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S, limits=one_each) as client:
        return {client.post(f"/v1/pipelines/{pipeline}", json=body).status_code for _ in range(CONNECTIONS)}


async def test_a_killed_worker_loses_only_its_current_requests(pair: GatewayProcess) -> None:
    counted, deaths = pair.metric("requests_total", **COUNTED), pair.metric("worker_deaths_total")
    statuses = set[int]()

    def is_replaced() -> bool:
        """The other worker keeps the gateway ready. The worker that is killed may reset the question."""
        with suppress(httpx.TransportError):
            statuses.add(httpx.get(f"{pair.admin_url}/health/ready").status_code)
        return has_all_workers(pair)

    async with connections_to_each(pair, 2) as connections:
        killed, other = connections
        for connection in (*connections[killed], *connections[other]):
            connection.post("/v1/pipelines/scripted_patient/stream", script(outputs=500, interval_s=0.1).encode())
            await connection.reader.readuntil(b"id: 2")
        loading = asyncio.create_task(load(pair, "/v1/pipelines/scripted", INVALID, requests=REQUESTS))
        a_fifth = counted + REQUESTS / 5
        await asyncio.to_thread(eventually, lambda: pair.metric("requests_total", **COUNTED) > a_fifth)
        os.kill(killed, signal.SIGKILL)
        for connection in connections[killed]:
            received, was_reset = await connection.rest()
            assert was_reset or b"event: error" not in received
        results = await loading
        for connection in connections[other]:
            assert b"event: error" not in await connection.reader.readuntil(b"id: 30\n")
        await asyncio.to_thread(eventually, lambda: is_replaced() and deaths_of(pair) == deaths + 1)
    assert set(results.statuses) == {422}
    assert results.answered + results.broken == REQUESTS
    assert 0 < results.broken <= CONNECTIONS
    await asyncio.to_thread(eventually, lambda: pair.metric("active_streams") == 0)
    for metric in ("requests_total", "request_duration_seconds_count"):
        assert results.answered <= pair.metric(metric, **COUNTED) - counted <= REQUESTS
    assert pair.metric("worker_deaths_total") == deaths + 1
    assert statuses == {200}
    assert killed not in workers_of(pair)
    messages = [json.loads(line)["message"] for line in pair.log.splitlines()]
    assert any("is replaced" in each for each in messages)


@pytest.mark.full
def test_workers_exit_when_the_supervisor_is_killed(settings: dict[str, str], start_gateway: StartGateway) -> None:
    gateway = start_gateway(**settings)
    workers = workers_of(gateway)
    gateway.process.kill()
    gateway.process.wait()
    eventually(lambda: not any(map(psutil.pid_exists, workers)))
    with pytest.raises(httpx.ConnectError):
        httpx.get(gateway.url)
