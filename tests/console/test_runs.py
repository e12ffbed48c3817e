"""The runs of an explained request lie on one clock, and mark the step that failed or ended the request early."""

import json
import subprocess
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from app.api.explain.explanations import Explained, Explanation, spans_in
from app.core.errors import ContractViolation, DeadlineExceeded, GatewayError, ModelError, Outcome
from app.core.inference import SentAs, StepTime, StepTimes
from app.observability.record import RequestRecord
from tests.console.test_page import path_of
from tests.toolkit.collector import Export

STARTED_NS = 1_700_000_000_000_000_000
TRACE, TRITON_ID = "a" * 32, "t1"
SCRIPT_OF_NODE = f"""
import {{ readFileSync }} from "node:fs";
import {{ explained }} from {json.dumps(str(path_of("runs.js")))};
const [answer, graph] = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(explained(answer, graph)));
"""


def step(
    name: str, ensemble: str = "chain", *, model: str = "", decoupled: bool = False, calls: tuple[str, ...] = ()
) -> dict[str, Any]:
    found = {"name": name, "model": model or name, "decoupled": decoupled, "calls": [{"model": each} for each in calls]}
    return found | ({"ensemble": ensemble} if ensemble else {})


def edge(before: str | None, after: str | None) -> dict[str, Any]:
    return {"from": {"step": before, "tensor": "T"}, "to": {"step": after, "tensor": "T"}}


CHAIN = {
    "steps": [step("detect"), step("gate"), step("recognize")],
    "edges": [edge(None, "detect"), edge("detect", "gate"), edge("gate", "recognize"), edge("recognize", None)],
}
FORK = {
    "steps": [step("embed"), step("topic"), step("mood")],
    "edges": [edge("embed", "topic"), edge("embed", "mood")],
}
SCRIPT = {"steps": [step("script", "", calls=("embed", "topic"))], "edges": []}
OK = RequestRecord(
    "r1",
    "POST",
    "/v1/pipelines/ocr",
    started=100.0,
    pipeline="ocr",
    transport="unary",
    status=200,
    triton_request_id=TRITON_ID,
    total_s=0.050,
    queue_s=0.002,
    triton_at=100.005,
    triton_s=0.040,
)
EXIT = replace(OK, outcome=Outcome.EARLY_EXIT, early_exit="no_text")


def failed(error: GatewayError, step: str = "") -> RequestRecord:
    error.failed_step = step
    return replace(OK, status=502, outcome=error.outcome, error=error)


FAILED = failed(ModelError("broken"))


def export(*models: str, step_ms: float = 10.0, at_ms: float = 6.0) -> Export:
    """A call of the ensemble ``chain``, whose steps run one after the other."""
    spans = Export(TRACE, TRITON_ID, STARTED_NS)
    end_ms = at_ms + step_ms * len(models)
    call = spans.call(at_ms, end_ms + 2, end_ms)
    ensemble = spans.run("chain", call, at_ms, end_ms + 1)
    for place, model in enumerate(models):
        begins = at_ms + place * step_ms
        spans.run(model, ensemble, begins, begins + step_ms, begins + 1, begins + 2, begins + 8, begins + 9)
    return spans


def answer_of(spans: Export | None, record: RequestRecord | None = OK) -> dict[str, Any]:
    """The gateway's answer."""
    request = Explained(Explanation("r1", "ocr"), TRACE, STARTED_NS)
    for span in spans_in(spans.body()) if spans else ():
        request.spans[span.span_id] = span.since(STARTED_NS)
    if record is not None:
        request.end(replace(record))
    answer: dict[str, Any] = msgspec.to_builtins(request.explanation())
    return answer


def computed(answer: dict[str, Any], graph: dict[str, Any]) -> dict[str, Any]:
    """Calls ``runs.js`` in Node. ``graph``: as ``GET /v1/pipelines/{pipeline}`` has it."""
    command = ["node", "--input-type=module", "--eval", SCRIPT_OF_NODE]
    done = subprocess.run(command, input=json.dumps([answer, graph]), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def explained(spans: Export | None, record: RequestRecord | None = OK, graph: dict[str, Any] = CHAIN) -> dict[str, Any]:
    return computed(answer_of(spans, record), graph)


def states(found: dict[str, Any]) -> dict[str, str]:
    return {span["name"]: span["state"] for span in found["spans"]}


def test_the_phases_add_up_to_the_total() -> None:
    found = explained(None)
    assert found["gateway"] == [
        {"name": "read", "start_ms": 0.0, "duration_ms": 3.0},
        {"name": "queue", "start_ms": 3.0, "duration_ms": 2.0},
        {"name": "triton", "start_ms": 5.0, "duration_ms": 40.0},
        {"name": "respond", "start_ms": 45.0, "duration_ms": 5.0},
    ]
    assert sum(phase["duration_ms"] for phase in found["gateway"]) == found["total_ms"] == 50.0


def test_a_running_request_is_not_complete() -> None:
    found = explained(export("detect"), None)
    assert (found["is_complete"], found["outcome"], found["gateway"], found["spans"]) == (False, None, [], [])
    assert found["notes"] == ["The request is still running."]


def test_a_request_that_did_not_reach_triton_is_complete() -> None:
    found = explained(None, replace(OK, status=422, outcome=Outcome.CLIENT_ERROR, triton_at=0.0, triton_s=0.0))
    assert [phase["name"] for phase in found["gateway"]] == ["read", "queue"]
    assert sum(phase["duration_ms"] for phase in found["gateway"]) == found["total_ms"]
    assert found["is_complete"]


def test_a_step_has_its_queue_and_its_compute() -> None:
    found = explained(export("detect", "gate", "recognize"))
    ensemble, detect, *_ = found["spans"]
    assert (ensemble["kind"], ensemble["parent"], ensemble["queue_ms"], ensemble["compute_ms"]) == (
        *("ensemble", None),
        *(None, None),
    )
    assert detect == {
        "id": detect["id"],
        "parent": ensemble["id"],
        "name": "detect",
        "kind": "step",
        "model": "detect",
        "version": "1",
        "start_ms": 6.0,
        "duration_ms": 10.0,
        "queue_ms": 1.0,
        "compute_input_ms": 1.0,
        "compute_ms": 6.0,
        "compute_output_ms": 1.0,
        "state": "ok",
    }
    assert (found["is_complete"], found["steps_not_run"]) == (True, [])


def test_spans_without_their_call_are_not_complete() -> None:
    spans = export("detect", "gate")
    del spans.spans[0]
    found = explained(spans, EXIT)
    assert (found["is_complete"], found["steps_not_run"]) == (False, [])
    assert set(states(found).values()) == {"unknown"}


ENDS: dict[str, tuple[RequestRecord, dict[str, Any], str, list[str]]] = {
    "exit": (EXIT, CHAIN, "chain early_exit, detect ok, gate early_exit", ["recognize"]),
    "exit by outputs": (EXIT, CHAIN, "chain early_exit, detect ok, gate ok, recognize ok", []),
    "failure": (FAILED, CHAIN, "chain failed, detect failed", ["gate", "recognize"]),
    "one of two": (FAILED, FORK, "chain failed, embed ok, topic failed", ["mood"]),
    "two at once": (FAILED, FORK, "chain failed, embed ok, topic unknown, mood unknown", []),
    "named": (failed(ModelError("broken"), "mood"), FORK, "chain failed, embed ok, topic ok, mood failed", []),
    "deadline": (failed(DeadlineExceeded("late")), CHAIN, "chain unknown, detect unknown", ["gate", "recognize"]),
    "contract": (
        failed(ContractViolation("repeats", tensor="T")),
        CHAIN,
        "chain failed, detect ok, gate ok, recognize ok",
        [],
    ),
}


@pytest.mark.parametrize(("record", "graph", "wanted", "missing"), ENDS.values(), ids=ENDS)
def test_the_step_that_ended_the_request_is_marked(
    record: RequestRecord, graph: dict[str, Any], wanted: str, missing: list[str]
) -> None:
    """``wanted``: the ensemble and each step that ran, with their states."""
    expected = dict(each.split() for each in wanted.split(", "))
    found = explained(export(*[name for name in expected if name != "chain"]), record, graph)
    assert states(found) == expected
    assert found["steps_not_run"] == missing


def test_a_model_that_occurs_twice_is_named_as_in_the_graph() -> None:
    twice = {"steps": [step("clean"), step("clean#2", model="clean")], "edges": []}
    found = explained(export("clean", "clean"), graph=twice)
    assert [span["name"] for span in found["spans"]] == ["chain", "clean", "clean#2"]


def test_the_models_that_a_script_called_are_bls() -> None:
    spans = Export(TRACE, TRITON_ID, STARTED_NS)
    script = spans.run("script", spans.call(6, 40, 38), 6, 39, 7, 8, 37, 38)
    spans.run("embed", script, 10, 20, 11, 12, 18, 19, name="an id of the script's own")
    found = explained(spans, graph=SCRIPT)
    assert [(span["name"], span["kind"], span["parent"]) for span in found["spans"]] == [
        ("script", "step", None),
        ("embed", "bls", script),
    ]
    assert found["notes"] == ["A script may call 'topic': not called here, or called without `trace=`."]


def test_spans_of_another_request_in_the_trace_are_left_out() -> None:
    spans = export("detect", "gate", "recognize")
    spans.run("stranger", spans.call(7, 9, 8), 7, 8, 7, 7, 8, 8, name="t2")
    assert "stranger" not in states(explained(spans))


def test_a_span_never_ends_after_the_answer() -> None:
    found = explained(export("detect", "gate", "recognize", step_ms=13.0))
    assert max(span["start_ms"] + span["duration_ms"] for span in found["spans"]) == 45.0
    assert found["notes"] == ["Triton ended spans up to 1.0 ms after their answers; that part is not shown."]


def script_and_child(script_end_ms: float, child_end_ms: float, *child_compute_ms: float) -> dict[str, Any]:
    """The explanation of a script and of a model that the script called."""
    spans = Export(TRACE, TRITON_ID, STARTED_NS)
    script = spans.run("script", spans.call(6, 40, 39), 6, script_end_ms, 7, 8, script_end_ms - 1, script_end_ms)
    spans.run("embed", script, 10, child_end_ms, *child_compute_ms)
    return explained(spans, graph=SCRIPT)


def test_a_called_model_ends_before_the_script_that_waited_for_it() -> None:
    """Triton ends the span of a called model after the script has its answer, at times after the script's own end."""
    found = script_and_child(30, 31.2, 11, 12, 28, 31)
    script, child = found["spans"]
    assert child["start_ms"] + child["duration_ms"] == script["start_ms"] + script["duration_ms"] == 30.0
    assert (child["queue_ms"], child["compute_input_ms"], child["compute_ms"]) == (1.0, 1.0, 16.0)
    assert child["compute_output_ms"] == 2.0
    assert "Triton ended spans up to 1.2 ms after their answers; that part is not shown." in found["notes"]


def test_a_called_model_that_works_after_the_script_is_shown_so() -> None:
    found = script_and_child(30, 36, 11, 12, 34, 35)
    _, child = found["spans"]
    assert (child["start_ms"], child["duration_ms"]) == (10.0, 26.0)
    assert (child["compute_ms"], child["compute_output_ms"]) == (22.0, 1.0)


def test_a_called_ensemble_ends_before_the_script_that_waited_for_it() -> None:
    spans = Export(TRACE, TRITON_ID, STARTED_NS)
    script = spans.run("script", spans.call(6, 40, 39), 6, 30, 7, 8, 29, 30)
    ensemble = spans.run("embed", script, 10, 31)
    spans.run("topic", ensemble, 11, 32, 12, 13, 28, 31)
    found = explained(spans, graph=SCRIPT)
    assert [span["start_ms"] + span["duration_ms"] for span in found["spans"]] == [30.0, 30.0, 30.0]


@pytest.mark.parametrize("off_ms", [-5000.0, 5000.0])
def test_another_clock_is_moved_into_the_phase(off_ms: float) -> None:
    found = explained(export("detect", "gate", "recognize", at_ms=10.0 + off_ms))
    ensemble = found["spans"][0]
    assert ensemble["start_ms"] == pytest.approx(10.0, abs=0.001)  # 30 ms in the middle of 40 ms
    assert "The clocks differ" in found["notes"][0]


def test_a_repeated_call_is_shown_too() -> None:
    spans = export("detect")
    second = export("detect", "gate", "recognize", step_ms=5.0, at_ms=20.0)
    for span in second.spans:
        span["spanId"] = "b" + span["spanId"][1:]
        span["parentSpanId"] = "b" + span["parentSpanId"][1:]
    spans.spans += second.spans
    found = explained(spans)
    assert [span["name"] for span in found["spans"]].count("detect") == 2
    assert found["steps_not_run"] == []
    assert "2 times" in found["notes"][0]


def test_spans_in_a_circle_end() -> None:
    spans = export("detect")
    spans.spans[1]["parentSpanId"], spans.spans[2]["parentSpanId"] = spans.spans[2]["spanId"], spans.spans[1]["spanId"]
    assert explained(spans)["is_complete"] is False


def test_deeply_nested_spans_are_shown() -> None:
    spans = Export(TRACE, TRITON_ID, STARTED_NS)
    parent = spans.call(6, 40, 39)
    for _ in range(1_000):
        parent = spans.run("chain", parent, 6, 38)
    found = explained(spans)
    assert len(found["spans"]) == 1_000
    assert found["spans"][-1]["parent"] == found["spans"][-2]["id"]


def test_a_span_that_was_exported_twice_is_shown_once() -> None:
    spans = export("detect", "gate", "recognize")
    once = explained(spans)
    spans.spans *= 2
    assert explained(spans) == once


def test_a_decoupled_step_says_what_its_span_leaves_out() -> None:
    streams = {"steps": [step("detect", decoupled=True)], "edges": []}
    assert "'detect' is decoupled" in explained(export("detect"), graph=streams)["notes"][0]


@pytest.mark.parametrize(("others", "text"), [(1, "with 1 other in"), (23, "with 23 others in")])
def test_a_shared_call_is_explained(others: int, text: str) -> None:
    found = explained(None, replace(OK, sent_as=SentAs("tid", None, {"shared_with": others})))
    assert found["shared_with"] == others
    assert any(text in note for note in found["notes"])
    assert not any("one call" in note for note in explained(None)["notes"])


OF_STEPS = {
    "steps": [step(name, "", model=model) for name, model in (("find", "detect"), ("read", "ocr"), ("more", "ocr"))],
    "edges": [edge("find", "read"), edge("find", "more")],
    "exits": [{"step": "read", "reason": "no_text", "name": "none"}, {"step": "find", "reason": "no", "name": "no"}],
}


def test_steps_of_the_gateway_have_its_own_times_and_the_runs_of_their_calls() -> None:
    times = {
        "find": StepTime("ok", 100.006, 100.016, 0.010),
        "no": StepTime("skipped", 100.016, 100.016, 0.0),
        "more": StepTime("skipped", 100.016, 100.016, 0.0),
        "read": StepTime("failed", 100.016, 100.036, 0.020),
    }
    spans = Export(TRACE, f"{TRITON_ID}.read.2", STARTED_NS)
    spans.run("ocr", spans.call(17, 35, 34), 18, 34, 19, 20, 32, 33)
    found = explained(spans, replace(OK, steps=StepTimes(steps=times, calls=2)), OF_STEPS)
    assert [(each["name"], each["kind"], each["state"]) for each in found["spans"]] == [
        ("find", "step", "ok"),
        ("read", "step", "failed"),
        ("ocr", "run", "unknown"),
    ]
    assert [(each["start_ms"], each["duration_ms"]) for each in found["spans"]] == [(6, 10), (16, 20), (18, 16)]
    assert (found["spans"][2]["parent"], found["spans"][2]["compute_ms"]) == (found["spans"][1]["id"], 12)
    assert (found["steps_skipped"], found["steps_not_run"]) == (["more"], [])
    assert found["notes"] == ["Some of Triton's spans have not arrived yet."], "those of `find`"
    without = explained(None, replace(OK, steps=StepTimes(steps={"find": times["find"]}, calls=1)), OF_STEPS)
    assert [each["name"] for each in without["spans"]] == ["find"]
    assert without["steps_not_run"] == ["read", "more"]
