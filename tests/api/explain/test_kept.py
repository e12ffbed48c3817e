"""Explained requests are kept for a minute, within limits."""

import pytest

from app.api.explain import explanations as module
from app.api.explain.explanations import Explained, Explanations, TritonSpan
from app.core.errors import Outcome
from app.observability.record import RequestRecord


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


def test_spans_of_another_request_in_the_trace_are_not_shown() -> None:
    own = request(1)
    for each in spans(1, 3):
        own.spans[each.span_id] = each.since(0)
    own.end(record(1))
    assert (own.explanation().spans, own.explanation().outcome) == ([], Outcome.OK)


def test_without_a_call_of_triton_no_spans_are_shown() -> None:
    """Spans without a request id do not belong to a request that has none."""
    own, ended = request(1), record(1, triton_request_id="")
    ended.triton_at = 0.0
    for each in spans(1, 3):
        own.spans[each.span_id] = each.since(0)
    own.end(ended)
    assert (own.explanation().spans, own.explanation().is_complete) == ([], True)
