"""Readiness and the list of pipelines report why a pipeline is not ready."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.main import create_admin_app
from tests.toolkit.engine import FakeEngine
from tests.toolkit.exchange import connected
from tests.toolkit.gateway import Served, served
from tests.toolkit.models import model

PLAIN = model("X FP32 [1]", "Y FP32 [1]", name="plain")
CONFIG = "pipelines:\n  good: {model: plain}\n  bad: {model: plane, description: Later.}\n"
WHY = "Triton has no model 'plane'; did you mean 'plain'?"


@pytest.fixture
async def half_ready(tmp_path: Path) -> AsyncIterator[Served]:
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG)
    async with served(FakeEngine.of(PLAIN), path) as gateway:
        yield gateway


async def test_readiness_has_the_reason(half_ready: Served) -> None:
    for client in (half_ready.client, half_ready.admin):
        answer = await client.get("/health/ready")
        assert (answer.status_code, answer.json()) == (
            503,
            {
                "status": "not_ready",
                "triton": "up",
                "pipelines": {"good": "ready", "bad": "model_not_ready"},
                "state_detail": {"bad": WHY},
            },
        )


async def test_the_list_has_the_reason(half_ready: Served) -> None:
    pipelines = (await half_ready.client.get("/v1/pipelines")).json()["pipelines"]
    assert [(each["name"], each["state"], each["state_detail"]) for each in pipelines] == [
        ("good", "ready", None),
        ("bad", "model_not_ready", WHY),
    ]


async def test_a_pipeline_with_a_missing_model_is_described_in_part(half_ready: Served) -> None:
    answer = await half_ready.client.get("/v1/pipelines/bad")
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "name": "bad",
            "description": "Later.",
            "model": "plane",
            "state": "model_not_ready",
            "state_detail": WHY,
            "streams": False,
            "sessions": False,
            "url": "/v1/pipelines/bad",
        },
    )


async def test_a_request_to_a_pipeline_that_is_not_ready_is_503(half_ready: Served) -> None:
    answer = await half_ready.client.post("/v1/pipelines/bad", json={})
    assert (answer.status_code, answer.json()["code"]) == (503, "model_not_ready")
    assert answer.json()["detail"] == f"Pipeline 'bad' is not ready: model not ready. {WHY}"


class States:
    def __init__(self, **states: str) -> None:
        self.states = {number.removeprefix("w"): state for number, state in states.items()}
        self.is_ready = set(states.values()) == {"ready"}
        self.needs_restart = False


async def test_the_admin_port_is_ready_when_all_workers_are_ready(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("pipelines: {good: {model: plain}}")
    async with served(FakeEngine.of(PLAIN), path) as one:
        for workers, status in ((States(w1="ready", w2="ready"), 200), (States(w1="ready", w2="starting"), 503)):
            app = create_admin_app(one.gateway, api_port=8080, processes=workers)
            transport = httpx.ASGITransport(connected(app))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as admin:
                answer = await admin.get("/health/ready")
            assert (answer.status_code, answer.json()["workers"]) == (status, workers.states)
        assert "workers" not in (await one.admin.get("/health/ready")).json()
