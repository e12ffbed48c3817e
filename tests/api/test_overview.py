"""Readiness, the list of pipelines with their states, statistics, and the findings of the linter."""

from typing import Any
from unittest.mock import Mock

import httpx
import jsonschema
import pytest

from app.core.errors import ModelError, UpstreamUnavailable
from app.routes import create_admin_app
from tests.api.conftest import FINAL, PNG, READER, WRITER, word
from tests.toolkit.engine import FakeEngine
from tests.toolkit.exchange import connected
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.keys import bearer, entry
from tests.toolkit.models import model

FAULTY = """
pipelines:
  read: {model: reader, outputs: {text: {tensor: TEXT, kind: text}}, sample: {nonsense: 1}, warmup: false}
  write: {model: writer, outputs: {text: {tensor: TEXT, kind: text}}, stream: true, sample: {gone: 1}, warmup: false}
  lost: {model: typo, outputs: {text: {tensor: TEXT}}}
oip: {models: [absent]}
"""
SCOPES = [entry("all"), *(entry(name, pipelines=[name]) for name in ("read", "later", "lost"))]
faulty = gateway_fixture(FAULTY, READER, WRITER, keys=SCOPES)


def check_described(document: dict[str, Any], path: str, answer: Any) -> None:
    schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(document | schema).validate(answer)


class TestStatistics:
    async def test_requests_are_counted_by_pipeline_transport_and_outcome(self, api: Served) -> None:
        await api.client.post("/v1/pipelines/read", files={"image": PNG})
        await api.client.post("/v1/pipelines/read", json={})
        api.engine.answers = [word(b"a", 1), FINAL]
        await api.client.post("/v1/pipelines/write/stream", json={"prompt": "x"})
        api.engine.answers = [ModelError("no")]
        await api.client.post("/v1/pipelines/read", files={"image": PNG})
        answer = (await api.client.get("/v1/statistics")).json()
        read, write = answer["pipelines"]["read"], answer["pipelines"]["write"]
        assert read["unary"]["outcomes"] == {"ok": 1, "client_error": 1, "model_error": 1}
        assert write["stream"]["outcomes"] == {"ok": 1}
        assert write["unary"] == {"outcomes": {}, "durations": [0] * 19}
        durations = read["unary"]["durations"]
        assert len(durations) == len(answer["bounds_s"]) + 1
        assert durations == sorted(durations)
        assert durations[-1] == 1, "those of answered requests"
        check_described((await api.client.get("/openapi.json")).json(), "/v1/statistics", answer)
        await api.client.post("/v1/pipelines/read", files={"image": PNG})
        assert (await api.client.get("/v1/statistics")).json() == answer, "many pages cost as much as one"


class TestFindings:
    async def found(self, api: Served, key: str) -> list[dict[str, Any]]:
        answer = await api.client.get("/v1/findings", headers=bearer(key))
        document = (await api.client.get("/openapi.json", headers=bearer(key))).json()
        check_described(document, "/v1/findings", answer.json())
        return list(answer.json()["findings"])

    async def test_each_says_where_and_what(self, faulty: Served) -> None:
        found = await self.found(faulty, "all")
        assert {(each["code"], each["pipeline"]) for each in found if each["code"] == "sample"} == {
            ("sample", "read"),
            ("sample", "write"),
        }
        (sample,) = [each for each in found if each["pipeline"] == "read"]
        assert sample["severity"] == "error"
        assert sample["text"].startswith("gateway.yaml:3: pipelines.read.sample.nonsense is not a field")
        assert sample["solution"].startswith("Correct the line that the finding names.")
        assert [each["model"] for each in found if each["code"] == "gateway-yaml"] == ["typo", "absent"]

    async def test_a_key_with_a_scope_sees_those_of_its_pipelines_without_other_names(self, faulty: Served) -> None:
        reads = await self.found(faulty, "read")
        assert reads
        assert {each["pipeline"] or each["model"] for each in reads} <= {"read", "reader"}
        assert await self.found(faulty, "later") == []
        texts = {key: (await self.found(faulty, key))[-1]["text"] for key in ("lost", "all")}
        assert texts["lost"].endswith("'typo' is not a model in the repository")
        assert texts["all"].endswith("'absent' is not a model in the repository; valid here: reader, writer")

    async def test_triton_is_not_asked_again_at_once(self, faulty: Served) -> None:
        before = await self.found(faulty, "all")
        faulty.engine.is_up = False
        assert await self.found(faulty, "all") == before

    async def test_without_triton_it_is_503(self, api: Served) -> None:
        api.engine.is_up = False
        answer = await api.client.get("/v1/findings")
        assert (answer.status_code, answer.json()["code"]) == (503, UpstreamUnavailable.code)


PLAIN = model("X FP32 [1]", "Y FP32 [1]", name="plain")
HALF_READY = "pipelines:\n  good: {model: plain}\n  bad: {model: plane, description: Later.}\n"
WHY = "Triton has no model 'plane'; did you mean 'plain'?"


half_ready = gateway_fixture(HALF_READY, PLAIN)


async def test_a_pipeline_that_is_not_ready_has_the_reason_everywhere(half_ready: Served) -> None:
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
    pipelines = (await half_ready.client.get("/v1/pipelines")).json()["pipelines"]
    assert [(each["name"], each["state"], each["state_detail"]) for each in pipelines] == [
        ("good", "ready", None),
        ("bad", "model_not_ready", WHY),
    ]
    described = await half_ready.client.get("/v1/pipelines/bad")
    assert (described.status_code, described.json()) == (
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
    refused = await half_ready.client.post("/v1/pipelines/bad", json={})
    assert (refused.status_code, refused.json()["code"]) == (503, "model_not_ready")
    assert refused.json()["detail"] == f"Pipeline 'bad' is not ready: model not ready. {WHY}"


async def test_a_pipeline_names_the_tritons_that_lack_its_model(
    half_ready: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = {"triton-1:1": "not_ready"}
    monkeypatch.setattr(half_ready.engine, "states", lambda: {"triton-1:1": "up", "triton-2:1": "up"})
    monkeypatch.setattr(half_ready.engine, "absences", lambda name, _: lacking if name == "plain" else {})
    pipelines = (await half_ready.client.get("/v1/pipelines")).json()["pipelines"]
    assert [each.get("missing_at") for each in pipelines] == [lacking, None]
    readiness = (await half_ready.admin.get("/health/ready")).json()
    assert readiness["tritons"] == {"triton-1:1": "up", "triton-2:1": "up"}
    assert readiness["missing_at"] == {"good": lacking}


@pytest.mark.parametrize(("states", "status"), [(["ready", "ready"], 200), (["ready", "starting"], 503)])
@pytest.mark.parametrize("needs_restart", [False, True])
async def test_the_admin_port_speaks_for_all_workers(states: list[str], status: int, needs_restart: bool) -> None:
    """Any worker may say that Triton needs a restart, which fails Triton's liveness."""
    workers = Mock(
        states={str(number): state for number, state in enumerate(states, 1)},
        is_ready=set(states) == {"ready"},
        needs_restart=needs_restart,
    )
    async with served(FakeEngine.of(PLAIN), "pipelines: {good: {model: plain}}") as one:
        app = create_admin_app(one.gateway, api_port=8080, processes=workers)
        transport = httpx.ASGITransport(connected(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as admin:
            answer = await admin.get("/health/ready")
            assert (answer.status_code, answer.json()["workers"]) == (status, workers.states)
            assert (await admin.get("/health/triton")).status_code == (503 if needs_restart else 200)
        assert "workers" not in (await one.admin.get("/health/ready")).json()
