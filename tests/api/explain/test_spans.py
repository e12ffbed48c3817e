"""Triton's exports are read, and a body that is no export is refused, whatever it holds."""

from typing import Any

import pytest

from app.api.explain.explanations import spans_in
from app.core.errors import InvalidJson
from tests.toolkit.triton_spans import Export

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
    call, run, compute = (span.since(999_000_000) for span in spans_in(export().body()))
    assert (call.name, call.model, call.moments) == ("InferRequest", "", {"INFER_RESPONSE_COMPLETE": 9.0})
    assert (run.model, run.version, run.request_id, run.parent) == ("reader", "1", "r1", call.id)
    assert (run.start_ms, run.end_ms) == (2.0, 9.5)
    assert compute.parent == run.id
    assert compute.moments["COMPUTE_OUTPUT_START"] == 8.0


def test_unknown_members_and_numbers_as_numbers_are_accepted() -> None:
    (first, *_) = spans_in(changed(startTimeUnixNano=5, links=[{"x": [[]]}], droppedEventsCount=3))
    assert first.start_time_unix_nano == 5


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
