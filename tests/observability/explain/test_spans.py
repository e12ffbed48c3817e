"""Triton's exports are read, and a body that is no export is refused, whatever it holds."""

import json
from typing import Any

import pytest

from app.observability.explain.spans import NotSpans, spans_in
from tests.fakes.triton_spans import Export

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
    call, run, compute = spans_in(export().body())
    assert (call.name, call.model, call.moments) == ("InferRequest", "", {"INFER_RESPONSE_COMPLETE": 1_008_000_000})
    assert (run.model, run.version, run.request_id, run.parent_id) == ("reader", "1", "r1", call.span_id)
    assert (run.start_ns, run.end_ns) == (1_001_000_000, 1_008_500_000)
    assert compute.parent_id == run.span_id
    assert compute.moments["COMPUTE_OUTPUT_START"] == 1_007_000_000


def test_unknown_members_and_numbers_as_numbers_are_accepted() -> None:
    (first, *_) = spans_in(changed(startTimeUnixNano=5, links=[{"x": [[]]}], droppedEventsCount=3))
    assert first.start_ns == 5


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
        changed(name="x" * 300),
        changed(events=[{"name": "QUEUE_START", "timeUnixNano": "now"}]),
    ],
    ids=[
        *("empty", "list", "no spans", "no text", "number", "empty span", "deep unknown", "deep known"),
        *("trace id", "span id", "large number", "negative", "long name", "time"),
    ],
)
def test_a_body_that_is_no_export_is_refused(body: bytes) -> None:
    with pytest.raises(NotSpans):
        list(spans_in(body))


def test_texts_are_bounded() -> None:
    spans = export()
    spans.spans[1]["attributes"][2]["value"]["stringValue"] = "x" * 10_000
    assert len([span.request_id for span in spans_in(json.dumps(json.loads(spans.body())).encode())][1]) == 256
