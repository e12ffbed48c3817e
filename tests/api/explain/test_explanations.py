"""``X-Explain``: who may ask, what the gateway then sends, the receiver of Triton's spans, and what is kept of them."""

import asyncio
import re
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from app.api.explain import explanations as module
from app.api.explain.explanations import Explained, Explanation, Explanations, TritonSpan, spans_in
from app.core.errors import InvalidJson, ModelError, Outcome
from app.observability.record import RequestRecord
from app.steps.steps_engine import StepsEngine
from tests.api.conftest import FINAL, PNG, READ, READER, scripted, scripted_fixture, word
from tests.toolkit.collector import Export, collecting
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served, served
from tests.toolkit.keys import bearer, entry
from tests.toolkit.numpy_models import FreeSlots

EXPLAIN, JSON = {"X-Explain": "1"}, {"Content-Type": "application/json"}
CALLER = "00-" + "a" * 32 + "-" + "b" * 16
KEYS = [entry("explains", explain=True), entry("other", explain=True), entry("plain")]


api = scripted_fixture(explains=True)
keyed = scripted_fixture(explains=False, keys=KEYS)


async def run(api: Served, headers: dict[str, str] | None = None) -> httpx.Response:
    return await api.client.post("/v1/pipelines/read", files={"image": PNG}, headers=EXPLAIN | (headers or {}))


async def explanation(api: Served, answer: httpx.Response, headers: dict[str, str] | None = None) -> httpx.Response:
    return await api.client.get(f"/v1/requests/{answer.headers['x-request-id']}/explain", headers=headers)


class TestWhoMayExplain:
    async def test_without_the_header_nothing_is_traced(self, api: Served) -> None:
        for headers in ({}, {"X-Explain": "0"}, {"X-Explain": "yes"}):
            answer = await api.client.post("/v1/pipelines/read", files={"image": PNG}, headers=headers)
            assert api.engine.requests[-1].trace is None
            assert "read;dur=" not in answer.headers["server-timing"]
            assert (await explanation(api, answer)).json()["code"] == "unknown_request"

    async def test_a_gateway_that_explains_nothing_ignores_the_header(self) -> None:
        async with scripted() as api:
            answer = await run(api)
            assert (answer.status_code, api.engine.requests[-1].trace) == (200, None)
            refused = await explanation(api, answer)
            assert (refused.status_code, refused.json()["code"]) == (404, "unknown_request")
            assert (await api.admin.post("/v1/traces", json={"resourceSpans": []})).status_code == 404
            assert (await api.client.get("/v1/pipelines")).json()["may_explain"] is False

    async def test_a_key_needs_the_scope_and_reads_only_its_own_explanations(self, keyed: Served) -> None:
        for name, may in (("explains", True), ("plain", False)):
            listed = await keyed.client.get("/v1/pipelines", headers=bearer(name))
            assert listed.json()["may_explain"] is may
            answer = await run(keyed, bearer(name))
            assert (answer.status_code, keyed.engine.requests[-1].trace is not None) == (200, may)
            readers = {"explains": 200 if may else 404, "other": 404, "plain": 404}
            for reader, status in readers.items():
                assert (await explanation(keyed, answer, bearer(reader))).status_code == status
            assert (await explanation(keyed, answer)).status_code == 401


@pytest.mark.parametrize(
    ("flags", "trace_id", "is_own_span"), [("", None, True), ("-01", "a" * 32, False), ("-00", "a" * 32, True)]
)
async def test_the_trace_is_sampled(api: Served, flags: str, trace_id: str | None, is_own_span: bool) -> None:
    """A sampled trace of the caller is used. One that is not sampled is sampled under another span."""
    await run(api, {"traceparent": CALLER + flags} if flags else None)
    trace = api.engine.requests[-1].trace
    assert trace is not None
    assert trace.is_sampled
    assert trace_id in (None, trace.trace_id)
    assert (trace.span_id != "b" * 16) is is_own_span


class TestTheGatewaysPart:
    async def test_the_phases_add_up(self, api: Served) -> None:
        answer = await run(api)
        parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
        assert list(parts) == ["gateway", "queue", "triton", "read", "respond"]
        assert float(parts["read"]) + float(parts["respond"]) == pytest.approx(float(parts["gateway"]), abs=0.02)
        found = (await explanation(api, answer)).json()
        assert list(found["gateway"]) == ["read", "queue", "triton", "respond"]
        assert sum(found["gateway"].values()) == pytest.approx(found["total_ms"], abs=0.01)
        assert (found["status"], found["outcome"], found["error"], found["is_complete"]) == (200, "ok", None, False)
        assert (found["request_id"], found["pipeline"]) == (answer.headers["x-request-id"], "read")

    async def test_failures_are_explained_without_and_with_triton(self, api: Served) -> None:
        answer = await api.client.post("/v1/pipelines/write", json={"prompt": 5}, headers=EXPLAIN)
        found = (await explanation(api, answer)).json()
        assert (found["status"], found["error"], found["is_complete"]) == (422, "invalid_input", True)
        assert list(found["gateway"]) == ["read", "queue"]
        api.engine.answers = [ModelError("no")]
        found = (await explanation(api, await run(api))).json()
        assert (found["status"], found["outcome"], found["error"]) == (502, "model_error", "model_error")
        assert "triton" in found["gateway"]

    @pytest.mark.parametrize("path", ["/v1/pipelines/write/stream", "/v1/streams"])
    async def test_a_stream_is_explained_until_its_end(self, api: Served, path: str) -> None:
        api.engine.answers = [0.02, word(b"a", 1), 0.02, word(b"b", 2), FINAL]
        body = {"pipeline": "write", "inputs": {"prompt": "x"}} if path == "/v1/streams" else {"prompt": "x"}
        answer = await api.client.post(path, json=body, headers=EXPLAIN)
        if path == "/v1/streams":
            running = (await explanation(api, answer)).json()
            assert (running["outcome"], running["total_ms"]) == (None, None)
            await api.client.get(answer.headers["location"])
        else:  # the wait for the first output is Triton's
            parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
            assert float(parts["triton"]) >= 20
        await asyncio.sleep(0)
        found = (await explanation(api, answer)).json()
        assert found["outcome"] == "ok"
        assert 40 <= found["gateway"]["triton"] <= found["total_ms"]
        assert sum(found["gateway"].values()) == pytest.approx(found["total_ms"], abs=0.01)


class TestTheReceiver:
    @staticmethod
    def export(api: Served) -> Export:
        request = api.engine.requests[-1]
        assert request.trace is not None
        spans = Export(request.trace.trace_id, request.request_id, 1_700_000_000_000_000_000)
        spans.run("reader", spans.call(0, 2, 1), 0, 1, 0.1, 0.2, 0.8, 0.9)
        return spans

    @staticmethod
    def stranger() -> bytes:
        """An export of another trace."""
        spans = Export("c" * 32, "t9", 0)
        spans.run("reader", "", 0, 1)
        return spans.body()

    async def test_tritons_spans_complete_the_explanation(self, api: Served) -> None:
        answer = await run(api)
        for body in (self.export(api).body(), self.stranger()):
            taken = await api.admin.post("/v1/traces", content=body, headers=JSON)
            assert (taken.status_code, taken.json()) == (200, {})
        found = (await explanation(api, answer)).json()
        assert found["is_complete"]
        call, reader, compute = found["spans"]
        assert [span["model"] for span in found["spans"]] == ["", "reader", ""]
        assert (reader["parent"], compute["parent"]) == (call["id"], reader["id"])
        assert (reader["end_ms"] - reader["start_ms"], compute["moments"]["COMPUTE_END"]) == (
            pytest.approx(1.0),
            compute["end_ms"],
        )

    @pytest.mark.parametrize(
        ("body", "content_type", "status"),
        [
            (b'{"resourceSpans": 1}', "application/json", 400),
            (b"{}", "text/plain", 415),
            (b"{}", "application/x-protobuf", 415),
            (b" " * (4 * 1024 * 1024 + 1), "application/json", 413),
            (b"[" * 1_000_000, "application/json", 400),
        ],
        ids=["no export", "text", "protobuf", "large", "deep"],
    )
    async def test_other_bodies_are_refused(self, api: Served, body: bytes, content_type: str, status: int) -> None:
        await run(api)
        answer = await api.admin.post("/v1/traces", content=body, headers={"Content-Type": content_type})
        assert answer.status_code == status
        assert (await api.client.post("/v1/traces", json={"resourceSpans": []})).status_code == 404, "the main port"

    async def test_a_collector_gets_every_export_unchanged(self) -> None:
        with collecting() as collector:
            async with scripted(explains=True, collector_url=f"{collector.url}/v1/traces") as api:
                answer = await api.admin.post("/v1/traces", content=self.stranger(), headers=JSON)
                assert answer.status_code == 200
            assert [(span.trace_id, span.name) for span in collector.spans] == [("c" * 32, "reader")]

    async def test_without_its_collector_the_explanation_still_gets_the_spans(self) -> None:
        async with scripted(explains=True, collector_url="http://127.0.0.1:9/v1/traces") as api:
            explained = await run(api)
            answer = await api.admin.post("/v1/traces", content=self.export(api).body(), headers=JSON)
            assert answer.status_code == 503
            assert (await explanation(api, explained)).json()["is_complete"]


async def test_the_answer_fits_its_description(api: Served) -> None:
    document = (await api.client.get("/openapi.json")).json()
    described = document["paths"]["/v1/requests/{id}/explain"]["get"]["responses"]["200"]["content"]
    found = (await explanation(api, await run(api))).json()
    assert described["application/json"]["schema"] == {"$ref": "#/components/schemas/Explanation"}
    assert set(document["components"]["schemas"]["Explanation"]["required"]) == set(found)
    names = [each["name"] for each in document["paths"]["/v1/pipelines/read"]["post"]["parameters"]]
    assert "X-Explain" in names


@pytest.fixture
def kept() -> Explanations:
    return Explanations(is_on=True, for_everyone=True, collector_url=None)


def request(number: int = 0) -> Explained:
    return Explained(Explanation(f"r{number}", "p"), f"{number:032x}", 0)


def record(number: int, *, triton_request_id: str = "t1") -> RequestRecord:
    return RequestRecord(
        f"r{number}", "POST", "/", triton_at=1.0, started=0.5, total_s=2.0, triton_request_id=triton_request_id
    )


def spans(number: int, count: int) -> list[TritonSpan]:
    return [TritonSpan(f"{number:032x}", f"{place:016x}", "s", 0, 1) for place in range(count)]


def test_two_requests_of_one_trace_have_its_spans_on_their_own_clocks(kept: Explanations) -> None:
    first, second = (
        Explained(Explanation("a", "p"), "0" * 32, 0),
        Explained(Explanation("b", "p"), "0" * 32, 1_000_000),
    )
    kept.keep("", first)
    kept.keep("", second)
    kept.add([TritonSpan("0" * 32, "1" * 16, "s", 3_000_000, 4_000_000)])
    assert [each.spans["1" * 16].start_ms for each in (first, second)] == [3.0, 2.0]


def test_two_owners_may_use_the_same_id(kept: Explanations) -> None:
    first, second = request(1), request(1)
    kept.keep("team-a", first)
    kept.keep("team-b", second)
    assert kept.current() == {("team-a", "r1"): first, ("team-b", "r1"): second}


def test_a_request_is_forgotten_a_minute_after_its_end(kept: Explanations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "monotonic", clock := Mock(return_value=0.0))
    own, endless = request(1), request(2)
    kept.keep("", own)
    kept.keep("", endless)
    clock.return_value = 300.0
    own.end(record(1))
    clock.return_value += module.KEEP_S - 1
    assert len(kept.current()) == 2
    clock.return_value += 1
    assert list(kept.current().values()) == [endless]
    endless.end(record(2))
    clock.return_value += module.KEEP_S
    assert not kept.current()


def test_the_oldest_requests_make_room(kept: Explanations) -> None:
    for number in range(module.MAX_REQUESTS + 1):
        kept.keep("", request(number))
    assert len(kept.current()) == module.MAX_REQUESTS
    assert ("", "r0") not in kept.current()


def test_the_spans_of_a_request_and_of_all_together_are_bounded(kept: Explanations) -> None:
    for number in range(module.MAX_ALL_SPANS // module.MAX_SPANS + 2):
        newest = request(number)
        kept.keep("", newest)
        kept.add(spans(number, module.MAX_SPANS + 5))
    assert sum(len(each.spans) for each in kept.current().values()) <= module.MAX_ALL_SPANS
    assert (len(newest.spans), newest.answer.dropped) == (module.MAX_SPANS, 5)


def test_an_id_that_is_used_again_has_only_the_new_trace(kept: Explanations) -> None:
    old, new = request(1), Explained(Explanation("r1", "p"), "b" * 32, 0)
    kept.keep("", old)
    kept.keep("", new)
    kept.add(spans(1, 3))
    old.end(record(1))
    assert kept.current() == {("", "r1"): new}
    assert (new.spans, new.explanation().outcome) == ({}, None)


@pytest.mark.parametrize(("triton_request_id", "triton_at"), [("t1", 1.0), ("", 0.0)])
def test_spans_of_another_request_are_not_shown(triton_request_id: str, triton_at: float) -> None:
    """Spans without a request id do not belong to a request that has none, because it has no call of Triton."""
    own, ended = request(1), record(1, triton_request_id=triton_request_id)
    ended.triton_at = triton_at
    for each in spans(1, 3):
        own.spans[each.span_id] = each.since(0)
    own.end(ended)
    explained = own.explanation()
    assert (explained.spans, explained.outcome, explained.is_complete) == ([], Outcome.OK, not triton_at)


TRACE = "a" * 32


def export() -> Export:
    spans = Export(TRACE, "r1", 1_000_000_000)
    call = spans.call(0.0, 9.0, 8.0)
    spans.run("reader", call, 1.0, 8.5, 2.0, 3.0, 7.0, 8.0)
    return spans


def changed(**members: Any) -> bytes:
    spans = export()
    spans.spans[0] |= members
    return spans.body()


def test_spans_have_their_model_and_the_times_of_their_phases() -> None:
    body = changed(startTimeUnixNano=1_000_000_000, links=[{"x": [[]]}], droppedEventsCount=3)  # unknown, a number
    call, run, compute = (span.since(999_000_000) for span in spans_in(body))
    assert (call.name, call.model, call.moments) == ("InferRequest", "", {"INFER_RESPONSE_COMPLETE": 9.0})
    assert (run.model, run.version, run.request_id, run.parent) == ("reader", "1", "r1", call.id)
    assert (run.start_ms, run.end_ms) == (2.0, 9.5)
    assert compute.parent == run.id
    assert compute.moments["COMPUTE_OUTPUT_START"] == 8.0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"resourceSpans": 5}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}',
        b'{"x":' + b"[" * 100_000,
        b'{"resourceSpans":' * 50_000,
        changed(traceId="A" * 32),
        changed(spanId="1"),
        changed(startTimeUnixNano="9" * 4000),
        changed(endTimeUnixNano="-1"),
        changed(events=[{"name": "QUEUE_START", "timeUnixNano": "now"}]),
    ],
    ids=[
        *("empty", "list", "no spans", "no text", "number", "empty span", "deep unknown", "deep known"),
        *("trace id", "span id", "large number", "negative", "time"),
    ],
)
def test_a_body_that_is_no_export_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidJson):
        spans_in(body)


def test_texts_are_bounded() -> None:
    spans = export()
    spans.spans[1]["attributes"][2]["value"]["stringValue"] = spans.spans[1]["name"] = "x" * 10_000
    spans.spans[1]["events"].append({"name": "OTHER", "timeUnixNano": "1"})
    run = spans_in(spans.body())[1].since(0)
    assert (len(run.request_id), len(run.name), list(run.moments)) == (256, 256, ["QUEUE_START"])


STEPS = """
pipelines:
  read:
    inputs: {image: {tensor: IMAGE, kind: image}}
    parameters: {mode: {type: string, default: once}}
    steps:
      first: {model: reader, inputs: {IMAGE: IMAGE}}
      again: {model: reader, when: {equals: [mode, twice]}, inputs: {IMAGE: IMAGE, NOTE: first.TEXT}}
    outputs: {text: {tensor: first.TEXT, kind: text}, more: {tensor: again.TEXT, kind: text}}
    warmup: false
"""


async def test_steps_of_the_gateway_have_their_times_also_without_spans_of_triton() -> None:
    async with served(FakeEngine.of(READER, answers=[0.02, READ]), STEPS, explains=True) as api:
        api.gateway.inference.engine = StepsEngine(api.engine, FreeSlots().enter)
        answer = await run(api)
        assert answer.status_code == 200, answer.text
        slowest = re.search(r"step;desc=first;dur=([0-9.]+)", answer.headers["server-timing"])
        assert slowest is not None
        assert float(slowest[1]) >= 20
        found = (await explanation(api, answer)).json()
        assert [(each["name"], each["outcome"]) for each in found["steps"]] == [("again", "skipped"), ("first", "ok")]
        first = found["steps"][1]
        assert 0 < first["start_ms"] <= first["end_ms"] <= found["total_ms"]
        assert first["total_ms"] >= 20
        assert not found["is_complete"], "Triton may still send spans"
        taken = await api.admin.post("/v1/traces", content=TestTheReceiver.export(api).body(), headers=JSON)
        assert taken.status_code == 200
        found = (await explanation(api, answer)).json()
        assert found["is_complete"]
        assert [span["request_id"].split(".")[1:] for span in found["spans"] if span["model"]] == [["first", "1"]]
