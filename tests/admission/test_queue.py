"""The order of the queue, compared with a simple model."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.queue import FairQueue

_numbers = count()


@dataclass(eq=False)
class Request:
    key: str = "a"
    priority: int = 0
    number: int = field(default_factory=lambda: next(_numbers))


def filled(*requests: Request) -> FairQueue[Request]:
    queue = FairQueue[Request]()
    for request in requests:
        queue.add(request)
    return queue


def drained(queue: FairQueue[Request]) -> list[Request]:
    found = []
    while (request := queue.take(lambda _: True)) is not None:
        found.append(request)
    return found


@pytest.mark.parametrize(
    ("waiting", "new", "displaced"),
    [
        ([Request("flood") for _ in range(4)] + [Request("other")], Request("new"), 3),
        ([Request("a"), Request("b")], Request("a"), None),
        ([Request("a"), Request("b")], Request("new"), None),
        ([Request("low", priority=-1), Request("a")], Request("a"), 0),
        ([Request("high", priority=1) for _ in range(9)], Request("new"), None),
    ],
    ids=["the newest of the longest line", "equally long lines", "a new line", "a lower priority", "a higher priority"],
)
def test_which_request_is_displaced(waiting: list[Request], new: Request, displaced: int | None) -> None:
    found = filled(*waiting).displaced_by(new.priority, new.key, lambda _: True)
    assert found is (None if displaced is None else waiting[displaced])


arrivals = st.tuples(st.just("arrives"), st.sampled_from("abc"), st.integers(-1, 1))
steps = st.one_of(arrivals, st.tuples(st.just("leaves"), st.integers(0, 30)), st.tuples(st.just("runs")))


@given(st.lists(steps, max_size=60))
def test_every_request_leaves_once_and_in_a_fair_order(history: list[tuple]) -> None:
    """The next request has the highest priority and is the oldest of its key."""
    queue, waiting = FairQueue[Request](), list[Request]()
    for step in history:
        if step[0] == "arrives":
            request = Request(step[1], step[2])
            ahead = queue.ahead_of(request.priority, request.key)
            assert ahead == len(waiting_ahead_of(request, waiting))
            queue.add(request)
            waiting.append(request)
        elif step[0] == "leaves" and waiting:
            request = waiting.pop(step[1] % len(waiting))
            assert queue.remove(request)
            assert not queue.remove(request)
        elif step[0] == "runs":
            request = queue.take(lambda _: True)
            assert (request is None) == (not waiting)
            if request is not None:
                assert request.priority == max(each.priority for each in waiting)
                own = [each for each in waiting if (each.key, each.priority) == (request.key, request.priority)]
                assert request is own[0]
                waiting.remove(request)
        assert queue.size == len(waiting)
        assert queue.ahead_of(-2, "new") == len(waiting)
        assert queue.callers() == len({(each.key, each.priority) for each in waiting})
    assert set(drained(queue)) == set(waiting)


def waiting_ahead_of(request: Request, waiting: list[Request]) -> list[Request]:
    """Returns requests of higher priority, of the same key, and one request of each other key for each turn."""
    same = [each for each in waiting if each.priority == request.priority]
    own = [each for each in same if each.key == request.key]
    others = [
        each
        for key in {each.key for each in same} - {request.key}
        for each in [one for one in same if one.key == key][: len(own) + 1]
    ]
    return [each for each in waiting if each.priority > request.priority] + own + others


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_no_key_runs_twice_while_another_waits_for_its_turn(keys: list[str]) -> None:
    queue = filled(*(Request(key) for key in keys))
    left = {key: keys.count(key) for key in set(keys)}
    last_run = dict.fromkeys(left, -1)
    for turn in range(len(keys)):
        request = queue.take(lambda _: True)
        assert request is not None
        waited = {key: turn - last_run[key] for key in left if left[key]}
        assert waited[request.key] == max(waited.values())
        left[request.key] -= 1
        last_run[request.key] = turn
