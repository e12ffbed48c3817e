"""The routes of pipelines: answers, errors, streams and their metrics, the states of pipelines, and findings."""

import asyncio
import time
from typing import Any
from unittest.mock import Mock

import httpx
import jsonschema
import numpy as np
import pytest

from app.api.call import Inference, InferenceCall
from app.core.errors import DeadlineExceeded, ModelError, TooManyRequests, UpstreamUnavailable
from app.core.inference import InferenceRequest
from app.core.json import json_of
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.routes import create_admin_app
from tests.api.conftest import FINAL, PNG, READER, WRITER, counted, events, word
from tests.toolkit.engine import FakeEngine
from tests.toolkit.exchange import connected
from tests.toolkit.gateway import Served, gateway_fixture, served
from tests.toolkit.keys import bearer, entry
from tests.toolkit.models import model, pipeline, refusal, response, tensor

READ, WRITE = "/v1/pipelines/read", "/v1/pipelines/write"
GROWN = response(tensor("TEXT", "BYTES", [b"a"]), tensor("TOKEN_ID", "INT32", [1, 2]), is_final=False)


class TestUnary:
    async def test_an_answer_has_its_headers(self, api: Served) -> None:
        answer = await api.client.post(READ, files={"image": PNG}, headers={"X-Request-ID": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert "gateway;dur=" in answer.headers["server-timing"]
        assert "x-early-exit" not in answer.headers
        assert api.engine.requests[0].request_id != "mine-1"
        assert counted(api, "read", "unary") == {"ok": 1}

    async def test_an_early_exit_is_an_empty_result(self, api: Served) -> None:
        api.engine.answers = [refusal("EXIT")]
        answer = await api.client.post(READ, files={"image": PNG})
        assert answer.status_code == 200
        assert answer.json() == {"text": None, "scores": [], "early_exit": "no_text"}
        assert answer.headers["x-early-exit"] == "no_text"
        assert counted(api, "read", "unary") == {"early_exit": 1}
        api.engine.answers = [word(b"a", 1), FINAL]
        answer = await api.client.post(WRITE, json={"prompt": "x"})
        assert answer.json() == {"text": "a", "token_id": [1]}, "the pipeline has no rules"

    @pytest.mark.parametrize("size", [8_192, 8_193, 300_000])
    async def test_a_large_answer_is_complete(self, api: Served, size: int) -> None:
        scores = (np.arange(size) / 7).astype(np.float32)
        api.engine.answers = [response(tensor("TEXT", "BYTES", [b"hi"]), tensor("SCORES", "FP32", scores))]
        answer = await api.client.post(READ, files={"image": PNG})
        assert answer.content == json_of({"text": "hi", "scores": scores, "early_exit": None})
        assert answer.headers["content-length"] == str(len(answer.content))

    @pytest.mark.parametrize(
        ("error", "status", "outcome"),
        [
            (ModelError("no"), 502, "model_error"),
            (TooManyRequests("full"), 429, "rejected"),
            (UpstreamUnavailable("gone"), 503, "unavailable"),
            (DeadlineExceeded("late"), 504, "timeout"),
        ],
    )
    async def test_errors_of_triton_have_a_status_and_an_outcome(
        self, api: Served, error: Any, status: int, outcome: str
    ) -> None:
        """Also before the first output of a stream."""
        api.engine.answers = [error]
        for path, transport in ((WRITE, "unary"), (f"{WRITE}/stream", "stream")):
            answer = await api.client.post(path, json={"prompt": "x"})
            assert (answer.status_code, answer.json()["code"]) == (status, error.code)
            assert ("retry-after" in answer.headers) is (status in {429, 503})
            assert counted(api, "write", transport) == {outcome: 1}

    async def test_an_unexpected_exception_is_500(self, api: Served, caplog: pytest.LogCaptureFixture) -> None:
        api.engine.answers = [ZeroDivisionError("secret")]  # type: ignore[list-item]
        answer = await api.client.post(READ, files={"image": PNG}, headers={"X-Request-ID": "mine-2"})
        assert (answer.status_code, answer.json()["code"]) == (500, "internal")
        assert answer.headers["x-request-id"] == answer.json()["request_id"] == "mine-2"
        assert "secret" not in answer.text
        assert "unexpected error" in caplog.text
        assert counted(api, "read", "unary") == {"internal": 1}

    async def test_a_draining_gateway_rejects_new_work_after_the_shutdown_delay(self, api: Served) -> None:
        workload = api.gateway.inference.workload
        workload.is_shutting_down = True
        assert (await api.client.post(READ, files={"image": PNG})).status_code == 200
        readiness = await api.client.get("/health/ready")
        assert (readiness.status_code, readiness.json()["status"]) == (503, "draining")
        workload.start_draining()
        answer = await api.client.post(READ, files={"image": PNG})
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        assert (await api.client.get("/health/ready")).status_code == 503
        assert (await api.client.get("/health/live")).status_code == 200


class TestStream:
    async def test_a_stream_has_outputs_and_a_done_event(self, api: Served) -> None:
        api.engine.answers = [word(b"\xe2", 1), word(b"\x82\xac", 2), FINAL]
        answer = await api.client.post(f"{WRITE}/stream", json={"prompt": "x"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert events(answer) == [
            (1, "output", {"text": "", "token_id": 1}),
            (2, "output", {"text": "€", "token_id": 2}),
            (
                3,
                "done",
                {"reason": "complete", "early_exit": None, "outputs": 2, "request_id": answer.headers["x-request-id"]},
            ),
        ]
        assert counted(api, "write", "stream") == {"ok": 1}

    async def test_text_with_line_ends_cannot_end_a_field(self, api: Served) -> None:
        hostile = "a\r\n\r\nevent: done\ndata: {}\n\n\0\u2028"
        api.engine.answers = [word(hostile.encode(), 1), FINAL]
        answer = await api.client.post(f"{WRITE}/stream", json={"prompt": "x"})
        assert [(name, data.get("text")) for _, name, data in events(answer)] == [("output", hostile), ("done", None)]

    async def test_an_error_after_commit_is_an_event(self, api: Served) -> None:
        api.engine.answers = [0.2, ModelError("no")]
        answer = await api.client.post(f"{WRITE}/stream", json={"prompt": "x"})
        assert answer.status_code == 200
        assert answer.text.startswith(":")
        ((number, name, problem),) = events(answer)
        assert (number, name, problem["code"]) == (1, "error", "model_error")
        assert problem["request_id"] == answer.headers["x-request-id"]
        assert counted(api, "write", "stream") == {"model_error": 1}

    async def test_a_stream_that_cannot_be_resumed_refuses_last_event_id(self, api: Served) -> None:
        """hey-api's client sends the POST again after a cut, and would show the start of the text twice."""
        resumed = {"Last-Event-ID": "24"}
        answer = await api.client.post("/v1/pipelines/write/stream", json={"prompt": "x"}, headers=resumed)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
        assert "/v1/streams" in answer.json()["hint"]
        assert not api.engine.requests


@pytest.mark.parametrize("ending", [DeadlineExceeded("late"), GROWN])
@pytest.mark.parametrize("path", [WRITE, f"{WRITE}/stream"])
async def test_an_unfinished_generation_is_cancelled(api: Served, ending: Any, path: str) -> None:
    api.engine.answers = [word(b"a", 1), ending]
    answer = await api.client.post(path, json={"prompt": "x"})
    if path == WRITE:
        assert answer.status_code == (502 if ending is GROWN else 504)
    else:
        assert [name for _, name, _ in events(answer)] == ["output", "error"]
    problem = answer.json() if path == WRITE else events(answer)[-1][2]
    violated = "Output 'TOKEN_ID' has shape [2]; the contract allows at most 1 items."
    assert problem["detail"] == (violated if ending is GROWN else "late")
    await api.gateway.inference.cancellations.close()
    first, call = api.engine.requests
    assert call.model == "writer"
    assert [(each.name, each.array.tolist()) for each in call.inputs] == [("CANCEL", [first.request_id.encode()])]
    assert call.request_id != first.request_id


WITHOUT_CANCEL = pipeline(model([], "Y FP32 [1]"))
WITH_CANCEL = pipeline(model([], "Y FP32 [1]"), cancel={"model": "generator", "input": "CANCEL"})
REQUEST = WITH_CANCEL.request_of_json(b"{}")


async def calls_of(engine: FakeEngine, p=WITH_CANCEL) -> list[InferenceRequest]:
    """The calls for an abandoned request, after their end."""
    inference = Inference(engine, Catalog(engine), Metrics("test"))
    inference.abandon(InferenceCall(p, None, None, None, [REQUEST]))
    await asyncio.sleep(0)
    await inference.cancellations.close()
    return engine.requests


async def test_a_pipeline_without_a_cancel_model_makes_no_call() -> None:
    assert await calls_of(FakeEngine(), WITHOUT_CANCEL) == []


async def test_a_failed_call_is_only_logged_and_closing_waits_for_a_slow_one(caplog: pytest.LogCaptureFixture) -> None:
    await calls_of(FakeEngine(answers=[UpstreamUnavailable("gone")]))
    assert "cancel call to model 'generator' failed" in caplog.text
    await calls_of(slow := FakeEngine(answers=[0.02]))
    assert slow.closed == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/pipelines/" + "x" * 500, 404, "unknown_pipeline"),
        ("POST", "/v1/pipelines/..%2fread", 404, "not_found"),
        ("POST", "/v1/pipelines/read/", 404, "not_found"),
        ("POST", "/v1/pipelines/read%00", 404, "unknown_pipeline"),
        ("GET", "/v1/pipelines/reed", 404, "unknown_pipeline"),
        ("POST", "/v1/pipelines//stream", 404, "not_found"),
        ("POST", "/v1", 404, "not_found"),
        ("GET", "/docs/errors/nothing", 404, "not_found"),
    ],
)
async def test_unknown_addresses_are_404(api: Served, method: str, path: str, status: int, code: str) -> None:
    answer = await api.client.request(method, path, content=b"{}", headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["x-request-id"] == answer.json()["request_id"]
    if method == "POST":
        assert counted(api, "-", "unary") == ({"client_error": 1} if code == "unknown_pipeline" else {})


async def test_an_unknown_address_names_the_nearest_one(api: Served) -> None:
    for path, near in {
        "/v1/pipeline/read": "/v1/pipelines",
        "/v1/stream": "/v1/streams",
        "/v1/nothing": "",
    }.items():
        hint = (await api.client.post(path, json={})).json()["hint"]
        assert hint == f"Did you mean {near}? " * bool(near) + "GET /docs lists the addresses."


SUMS = [
    model("X FP32 [1]", "Y FP32 [1]", name="traced", parameters=(("reads_traceparent", "true"),)),
    model("X FP32 [1]", "Y FP32 [1]", name="strict"),
]
sums = gateway_fixture(
    "pipelines: {traced: {model: traced}, strict: {model: strict, deadline_parameter: until_ms}}",
    *SUMS,
    answers=[response(tensor("Y", "FP32", [1]))],
)


async def test_the_deadline_is_sent_as_the_declared_parameter(sums: Served) -> None:
    for name in ("strict", "traced"):
        before_ms = time.time() * 1000
        await sums.client.post(f"/v1/pipelines/{name}", json={"X": [1]}, headers={"X-Request-Timeout": "10"})
        parameters = sums.engine.requests[-1].parameters
        if name == "traced":
            assert not parameters
            continue
        assert before_ms + 9_000 < parameters["until_ms"] < before_ms + 20_000
        assert type(parameters["until_ms"]) is int


@pytest.mark.parametrize("name", ["traced", "strict"])
async def test_a_model_that_declares_it_gets_the_trace_in_each_dialect(sums: Served, name: str) -> None:
    """Backends such as vLLM's fail on a parameter that they do not know."""
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    bodies: dict[str, dict[str, Any]] = {
        f"/v1/pipelines/{name}": {"X": [1]},
        f"/v2/models/{name}/infer": {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]},
        f"/v2/models/{name}/generate": {"X": [1]},
    }
    for path, body in bodies.items():
        answer = await sums.client.post(path, json=body, headers={"traceparent": traceparent})
        assert answer.status_code == 200, answer.text
        request = sums.engine.requests[-1]
        assert request.takes_traceparent is (name == "traced"), path
        assert request.trace is not None
        assert request.trace.traceparent == traceparent


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


async def test_statistics_count_requests_by_pipeline_transport_and_outcome(api: Served) -> None:
    await api.client.post(READ, files={"image": PNG})
    await api.client.post(READ, json={})
    api.engine.answers = [word(b"a", 1), FINAL]
    await api.client.post(f"{WRITE}/stream", json={"prompt": "x"})
    api.engine.answers = [ModelError("no")]
    await api.client.post(READ, files={"image": PNG})
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
    await api.client.post(READ, files={"image": PNG})
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
