"""The places of sessions: never more than the models have, at the Triton with the most free ones."""

from time import monotonic

import pytest

from app.admission.admission import WHOLE, Share
from app.admission.keys import ANYONE, Caller, CallerLimits
from app.api.sessions.open_sessions import LONGEST_RETRY_S, USUAL_RETRY_S, Place, Places
from app.core.errors import ModelNotReady, TooManyRequests
from app.core.model import SequenceIds
from app.sessions.session_terms import SessionSpec, SessionTerms, reach_s


def terms(*slots: int, max_open: int | None = None) -> SessionTerms:
    by_model = {f"m{number}": each for number, each in enumerate(slots)}
    return SessionTerms(SessionSpec(max_open=max_open), by_model, SequenceIds(), 60.0, 60.0)


def key(name: str, most: int | None = None) -> Caller:
    return Caller(name, limits=CallerLimits(sessions=most))


def taken(
    places: Places, given: SessionTerms, *homes: str, pipeline: str = "p", caller: Caller = ANYONE
) -> list[Place]:
    """As many places as there are."""
    found = []
    try:
        while True:
            found.append(places.take(pipeline, given, homes or ("",), len(homes) or 1, caller))
    except TooManyRequests:
        return found


@pytest.mark.parametrize(("given", "count"), [(terms(3), 3), (terms(3, 2), 2), (terms(5, max_open=2), 2)])
def test_the_narrowest_limit_counts(given: SessionTerms, count: int) -> None:
    places = Places(WHOLE)
    found = taken(places, given)
    assert len(found) == count
    places.release(found[0])
    assert len(taken(places, given)) == 1


def test_pipelines_over_one_model_share_its_places() -> None:
    places = Places(WHOLE)
    assert len(taken(places, terms(4, max_open=1), pipeline="a")) == 1
    assert len(taken(places, terms(4), pipeline="b")) == 3


@pytest.mark.parametrize(("total", "workers"), [(1, 3), (4, 3), (64, 4), (2, 2)])
def test_workers_together_never_have_more_places(total: int, workers: int) -> None:
    parts = [len(taken(Places(Share(number, workers)), terms(total))) for number in range(1, workers + 1)]
    assert sum(parts) == total


def test_a_session_goes_to_the_triton_with_the_most_free_places() -> None:
    places = Places(WHOLE)
    found = taken(places, terms(6), "a:1", "b:1")
    assert sorted(each.address for each in found) == ["a:1"] * 3 + ["b:1"] * 3
    for each in found:
        if each.address == "b:1":
            places.release(each)
    assert [each.address for each in taken(places, terms(6), "a:1", "b:1")] == ["b:1"] * 3
    with pytest.raises(ModelNotReady):
        places.take("p", terms(6), (), 2)


def test_a_refusal_tells_when_a_place_is_free() -> None:
    places = Places(WHOLE)
    (place,) = taken(places, terms(1))
    for until, expected in ((7.5, 8), (0.1, 1), (1000, LONGEST_RETRY_S)):
        places.free_at[place] = monotonic() + until
        with pytest.raises(TooManyRequests) as caught:
            places.take("p", terms(1), ("",), 1)
        assert caught.value.retry_after_s == expected
    places.release(place)
    taken(places, terms(1))
    with pytest.raises(TooManyRequests) as caught:
        places.take("p", terms(1), ("",), 1)
    assert caught.value.retry_after_s == USUAL_RETRY_S, "no sequence is known to end"


@pytest.mark.parametrize(("idle_s", "expected"), [(1.0, 0.9), (60.0, 55.0), (0.1, 0.05), (10.0, 9.0)])
def test_a_step_must_come_before_triton_forgets_the_sequence(idle_s: float, expected: float) -> None:
    assert reach_s(idle_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("most", "counts"), [(None, (4, 2, 2)), (6, (6, 1, 1)), (1, (1, 3, 4))], ids=["half", "more than half", "one"]
)
def test_a_key_has_a_share_of_the_places(most: int | None, counts: tuple[int, int, int]) -> None:
    """The others have the rest, and each its own share of it."""
    places = Places(WHOLE)
    first = taken(places, terms(8), caller=key("a", most))
    assert len(first) == counts[0]
    assert len(taken(places, terms(8), caller=key("b", counts[1]))) == counts[1]
    assert len(taken(places, terms(8))) == 8 - counts[0] - counts[1]
    places.release(first[0])
    assert len(taken(places, terms(8), caller=key("a", most))) == 1


def test_a_key_can_use_the_only_place() -> None:
    assert len(taken(Places(WHOLE), terms(1), caller=key("a"))) == 1


def test_the_limit_of_a_key_counts_the_sessions_of_all_models() -> None:
    places, caller = Places(WHOLE), key("a", 3)
    assert len(taken(places, terms(2), caller=caller)) == 2
    other = SessionTerms(SessionSpec(), {"other": 8}, SequenceIds(), 60.0, 60.0)
    assert len(taken(places, other, pipeline="other", caller=caller)) == 1
    with pytest.raises(TooManyRequests, match="this API key"):
        places.take("p", other, ("",), 1, caller)
