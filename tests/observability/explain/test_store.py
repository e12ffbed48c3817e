"""Explained requests are kept for a minute, within limits, each for its owner."""

from app.core.errors import Outcome
from app.observability.explain import store as store_module
from app.observability.explain.request import Ended, ExplainedRequest, Plan
from app.observability.explain.spans import TritonSpan
from app.observability.explain.store import ExplainStore

PLAN = Plan("p", "m", (), frozenset(), frozenset(), frozenset())
ENDED = Ended(200, Outcome.OK, None, None, "", "t1", 0.01, 0.0, 0.001, 0.008)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(number: int = 0, owner: str = "", ended: Ended | None = ENDED) -> ExplainedRequest:
    return ExplainedRequest(f"r{number}", owner, f"{number:032x}", 0, PLAN, ended)


def spans(number: int, count: int) -> list[TritonSpan]:
    return [TritonSpan(f"{number:032x}", f"{place:016x}", "", "s", 0, 1) for place in range(count)]


async def test_a_request_has_the_spans_of_its_trace() -> None:
    store = ExplainStore()
    store.put(request(1, ended=None))
    store.add(spans(1, 3) + spans(2, 3))
    store.put(request(1))
    found = store.find("", "r1")
    assert found is not None
    assert (found.request.ended, len(found.spans), found.dropped) == (ENDED, 3, 0)


async def test_only_the_owner_finds_a_request() -> None:
    store = ExplainStore()
    store.put(request(1, "team-a"))
    assert store.find("team-b", "r1") is None
    assert store.find("", "r1") is None
    assert store.find("team-a", "r1") is not None


async def test_two_owners_may_use_the_same_id() -> None:
    store = ExplainStore()
    first, second = request(1, "team-a"), ExplainedRequest("r1", "team-b", "b" * 32, 0, PLAN, ENDED)
    store.put(first)
    store.put(second)
    for owner, wanted in (("team-a", first), ("team-b", second)):
        found = store.find(owner, "r1")
        assert found is not None
        assert found.request == wanted


async def test_a_request_is_forgotten_a_minute_after_its_end() -> None:
    clock = Clock()
    store = ExplainStore(clock)
    store.put(request(1, ended=None))
    clock.now = 300.0
    store.put(request(1))
    clock.now += store_module.KEEP_S - 1
    assert store.find("", "r1") is not None
    clock.now += 1
    assert store.find("", "r1") is None
    assert not store.wants_spans()


async def test_a_request_without_an_end_is_forgotten_too() -> None:
    clock = Clock()
    store = ExplainStore(clock)
    store.put(request(1, ended=None))
    clock.now = store_module.LONGEST_S
    assert not store.wants_spans()


async def test_the_oldest_requests_make_room() -> None:
    store = ExplainStore()
    for number in range(store_module.MAX_REQUESTS + 1):
        store.put(request(number))
    assert store.find("", "r0") is None
    assert store.find("", "r1") is not None


async def test_the_spans_of_a_trace_are_bounded() -> None:
    store = ExplainStore()
    store.put(request(1))
    store.add(spans(1, store_module.MAX_SPANS + 5))
    found = store.find("", "r1")
    assert found is not None
    assert (len(found.spans), found.dropped) == (store_module.MAX_SPANS, 5)


async def test_all_spans_together_are_bounded() -> None:
    store = ExplainStore()
    requests = store_module.MAX_ALL_SPANS // store_module.MAX_SPANS + 2
    for number in range(requests):
        store.put(request(number))
        store.add(spans(number, store_module.MAX_SPANS))
    kept = [store.find("", f"r{number}") for number in range(requests)]
    assert sum(len(found.spans) for found in kept if found) <= store_module.MAX_ALL_SPANS
    assert kept[-1] is not None
    assert len(kept[-1].spans) == store_module.MAX_SPANS


async def test_an_id_that_is_used_again_has_only_the_new_trace() -> None:
    store = ExplainStore()
    store.put(request(1))
    store.add(spans(1, 3))
    store.put(ExplainedRequest("r1", "", "b" * 32, 0, PLAN))
    found = store.find("", "r1")
    assert found is not None
    assert (found.request.trace_id, found.spans) == ("b" * 32, ())
