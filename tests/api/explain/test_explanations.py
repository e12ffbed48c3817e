"""Explained requests are kept for a minute, within limits, with the spans of Triton's exports."""

from typing import Any

import pytest

from app.api.explain import explanations as module
from app.api.explain.explanations import Explained, Explanations, TritonSpan, spans_in
from app.core.errors import InvalidJson, Outcome
from app.observability.record import RequestRecord
from tests.toolkit.triton_spans import Export


@pytest.fixture
def kept() -> Explanations:
    return Explanations(is_on=True, for_everyone=True, collector_url=None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def request(number: int = 0) -> Explained:
    return Explained(f"r{number}", "p", f"{number:032x}", 0)


def record(number: int, *, triton_request_id: str = "t1") -> RequestRecord:
    return RequestRecord(
        f"r{number}", "POST", "/", triton_at=1.0, started=0.5, total_s=2.0, triton_request_id=triton_request_id
    )


def spans(number: int, count: int) -> list[TritonSpan]:
    return [TritonSpan(f"{number:032x}", f"{place:016x}", "s", 0, 1) for place in range(count)]


def test_two_requests_of_one_trace_have_its_spans_on_their_own_clocks(kept: Explanations) -> None:
    first, second = Explained("a", "p", "0" * 32, 0), Explained("b", "p", "0" * 32, 1_000_000)
    kept.keep("", first)
    kept.keep("", second)
    kept.add([TritonSpan("0" * 32, "1" * 16, "s", 3_000_000, 4_000_000)])
    assert [each.spans["1" * 16].start_ms for each in (first, second)] == [3.0, 2.0]


def test_two_owners_may_use_the_same_id(kept: Explanations) -> None:
    first, second = request(1), request(1)
    kept.keep("team-a", first)
    kept.keep("team-b", second)
    assert kept.current() == {("team-a", "r1"): first, ("team-b", "r1"): second}


def test_a_request_is_forgotten_a_minute_after_its_end(kept: Explanations, clock: Clock) -> None:
    own = request(1)
    kept.keep("", own)
    clock.now = 300.0
    own.end(record(1))
    clock.now += module.KEEP_S - 1
    assert kept.current()
    clock.now += 1
    assert not kept.current()


def test_a_request_without_an_end_is_forgotten_too(kept: Explanations, clock: Clock) -> None:
    kept.keep("", request(1))
    clock.now = module.LONGEST_S
    assert not kept.current()


def test_the_oldest_requests_make_room(kept: Explanations) -> None:
    for number in range(module.MAX_REQUESTS + 1):
        kept.keep("", request(number))
    assert len(kept.current()) == module.MAX_REQUESTS
    assert ("", "r0") not in kept.current()


def test_the_spans_of_a_request_are_bounded(kept: Explanations) -> None:
    own = request(1)
    kept.keep("", own)
    kept.add(spans(1, module.MAX_SPANS + 5))
    assert (len(own.spans), own.dropped) == (module.MAX_SPANS, 5)


def test_all_spans_together_are_bounded(kept: Explanations) -> None:
    for number in range(module.MAX_ALL_SPANS // module.MAX_SPANS + 2):
        newest = request(number)
        kept.keep("", newest)
        kept.add(spans(number, module.MAX_SPANS))
    assert sum(len(each.spans) for each in kept.current().values()) <= module.MAX_ALL_SPANS
    assert len(newest.spans) == module.MAX_SPANS


def test_an_id_that_is_used_again_has_only_the_new_trace(kept: Explanations) -> None:
    old, new = request(1), Explained("r1", "p", "b" * 32, 0)
    kept.keep("", old)
    kept.keep("", new)
    kept.add(spans(1, 3))
    old.end(record(1))
    assert kept.current() == {("", "r1"): new}
    assert (new.spans, new.ended) == ({}, None)


def test_the_record_of_an_ended_request_does_not_refer_to_itself() -> None:
    own, ended = request(1), record(1)
    ended.on_end = own.end
    ended.on_end(ended)
    assert (own.ended, ended.on_end) == (ended, None)


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
