"""The ledger finds unexplained differences."""

from collections import Counter

import pytest

from app.domain.errors import Outcome
from tests.live.chaos import reply
from tests.live.chaos.client import Ask, Ending, Seen, Stage
from tests.live.chaos.ledger import UNEXPLAINED, Entry, Ledger, Line, explanation

CONTENT = b"POST / HTTP/1.1\r\n\r\nbody"
ASK = Ask("a", "unary", CONTENT, reply.of_pipeline, Outcome.OK)
OK = Line(Outcome.OK, "", was_called=True)
CANCELLED = Line(Outcome.CANCELLED, "client_closed_request", was_called=True)
INVALID = Line(Outcome.CLIENT_ERROR, "invalid_input", was_called=False)
INTERNAL = Line(Outcome.INTERNAL, "internal", was_called=True)
RAN = Counter(received=1, answered=1)
CUTS = [(10.0, 11.0)]


def seen(ending: Ending = "answered", stage: Stage = "reading", sent: int = len(CONTENT), *outcomes: str) -> Seen:
    return Seen(ASK, ending, stage, 0.0, 1.0, sent, frozenset(outcomes or {Outcome.OK} if ending == "answered" else ()))


@pytest.mark.parametrize(
    ("entry", "because"),
    [
        (Entry(seen(), [OK], RAN), "the same"),
        (Entry(seen("left", "waiting"), [CANCELLED], Counter(received=1)), "the client left"),
        (Entry(seen("left", "sending", 5), [], Counter()), "the client left before the request was read"),
    ],
)
def test_a_difference_with_a_cause_is_explained(entry: Entry, because: str) -> None:
    assert explanation(entry, CUTS) == because


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(Entry(seen(), [OK, OK], RAN), id="counted twice"),
        pytest.param(Entry(seen(), [OK], Counter(received=2, answered=2)), id="executed twice"),
        pytest.param(Entry(seen(), [], RAN), id="answered but not counted"),
        pytest.param(Entry(seen(), [OK], Counter()), id="answered but not executed"),
        pytest.param(Entry(seen(), [OK], Counter(received=1)), id="answered before the model was done"),
        pytest.param(Entry(seen(), [CANCELLED], RAN), id="counted with another outcome"),
        pytest.param(Entry(seen("answered", "reading", len(CONTENT), Outcome.INTERNAL), [INTERNAL], RAN), id="a bug"),
        pytest.param(Entry(seen("stuck", "waiting"), [OK], RAN), id="without an end"),
        pytest.param(Entry(seen("lost", "waiting"), [OK], RAN), id="lost without a fault"),
        pytest.param(Entry(seen("left", "reading"), [], Counter()), id="answered in part but not counted"),
        pytest.param(Entry(seen("left", "waiting"), [], Counter(received=1)), id="executed but not counted"),
        pytest.param(Entry(seen("left", "waiting"), [INVALID], RAN), id="refused but executed"),
        pytest.param(Entry(seen("left", "sending", 20), [CANCELLED], RAN), id="executed half a body"),
    ],
)
def test_everything_else_is_unexplained(entry: Entry) -> None:
    assert explanation(entry, CUTS) == UNEXPLAINED


def test_a_line_of_nobodys_request_is_unexplained() -> None:
    ledger = Ledger([seen()], {"a": [OK], "b": [OK]}, {"a": RAN, "c": RAN})
    assert ledger.unexplained(CUTS) == ["stranger b", "stranger c"]
