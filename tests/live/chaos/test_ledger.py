"""The ledger finds unexplained differences."""

from collections import Counter
from dataclasses import replace

from app.core.errors import Outcome
from tests.live.chaos import reply
from tests.live.chaos.client import RESUMABLE, Ask, Break, Ending, Seen, Stage
from tests.live.chaos.ledger import UNEXPLAINED, Entry, Ledger, Line, explanation

CONTENT = b"POST / HTTP/1.1\r\n\r\nbody"
ASK = Ask("a", "unary", CONTENT, reply.of_pipeline, Outcome.OK)
OK = Line(Outcome.OK, "", was_called=True)
CANCELLED = Line(Outcome.CANCELLED, "client_closed_request", was_called=True)
INVALID = Line(Outcome.CLIENT_ERROR, "invalid_input", was_called=False)
INTERNAL = Line(Outcome.INTERNAL, "internal", was_called=True)
RAN, RECEIVED, NOTHING = Counter(received=1, answered=1), Counter(received=1), Counter[str]()
CUTS = [(10.0, 11.0)]


def seen(ending: Ending = "answered", stage: Stage = "reading", sent: int = len(CONTENT), *outcomes: str) -> Seen:
    return Seen(ASK, ending, stage, 0.0, 1.0, sent, frozenset(outcomes or {Outcome.OK} if ending == "answered" else ()))


def stream(ending: Ending = "answered", *broken: Break) -> Seen:
    return replace(seen(ending), ask=replace(ASK, dialect=RESUMABLE), breaks=broken)


LOST = seen("lost", "waiting")
EXPLAINED = {
    "the same": [Entry(seen(), [OK], RAN), Entry(stream("answered", Break(5.0, 10.1)), [OK], RAN)],
    "the client left": [Entry(seen("left", "waiting"), [CANCELLED], RECEIVED)],
    "the client left before the request was read": [Entry(seen("left", "sending", 5), [], NOTHING)],
    "the connection was cut": [Entry(replace(LOST, began=10.5, ended=10.9), [OK], RAN)],
}
NOT_EXPLAINED = {
    "counted twice": Entry(seen(), [OK, OK], RAN),
    "executed twice": Entry(seen(), [OK], Counter(received=2, answered=2)),
    "answered but not counted": Entry(seen(), [], RAN),
    "answered but not executed": Entry(seen(), [OK], NOTHING),
    "answered before the model was done": Entry(seen(), [OK], RECEIVED),
    "counted with another outcome": Entry(seen(), [CANCELLED], RAN),
    "a bug": Entry(seen("answered", "reading", len(CONTENT), Outcome.INTERNAL), [INTERNAL], RAN),
    "without an end": Entry(seen("stuck", "waiting"), [OK], RAN),
    "lost without a fault": Entry(LOST, [OK], RAN),
    "answered in part but not counted": Entry(seen("left", "reading"), [], NOTHING),
    "executed but not counted": Entry(seen("left", "waiting"), [], RECEIVED),
    "refused but executed": Entry(seen("left", "waiting"), [INVALID], RAN),
    "executed half a body": Entry(seen("left", "sending", 20), [CANCELLED], RAN),
    "a stream that is missing": Entry(stream("missing"), [OK], RAN),
    "a stream that never ended": Entry(stream("left"), [], RAN),
    "a stream cancelled without a request": Entry(replace(stream(), outcomes=frozenset()), [OK], RAN),
    "a reader lost without a fault": Entry(stream("answered", Break(5.0, 6.0)), [OK], RAN),
}


def test_a_difference_is_explained_only_by_its_cause() -> None:
    for because, entries in EXPLAINED.items():
        assert {explanation(entry, CUTS) for entry in entries} == {because}
    found = {case: explanation(entry, CUTS) for case, entry in NOT_EXPLAINED.items()}
    assert found == dict.fromkeys(NOT_EXPLAINED, UNEXPLAINED)


def test_a_line_of_an_unknown_request_is_unexplained() -> None:
    ledger = Ledger([seen()], {"a": [OK], "b": [OK]}, {"a": RAN, "c": RAN}, CUTS)
    assert ledger.unexplained() == ["stranger b", "stranger c"]
