"""The ledger finds unexplained differences."""

from collections import Counter
from dataclasses import replace

import pytest

from app.core.errors import Outcome
from tests.live.chaos import reply
from tests.live.chaos.client import RESUMABLE, Ask, Break, Ending, Seen, Stage
from tests.live.chaos.ledger import KILLED, LINE_LOST, UNEXPLAINED, Entry, Faults, Kill, Ledger, Line, explanation

CONTENT = b"POST / HTTP/1.1\r\n\r\nbody"
ASK = Ask("a", "unary", CONTENT, reply.of_pipeline, Outcome.OK)
STREAM = replace(ASK, dialect=RESUMABLE)
OK = Line(Outcome.OK, "", was_called=True)
CANCELLED = Line(Outcome.CANCELLED, "client_closed_request", was_called=True)
INVALID = Line(Outcome.CLIENT_ERROR, "invalid_input", was_called=False)
INTERNAL = Line(Outcome.INTERNAL, "internal", was_called=True)
RAN = Counter(received=1, answered=1)
PORT = 50_000
"""A connection of the worker that is killed at 20 s."""
FAULTS = Faults([(10.0, 11.0)], [Kill(20.0, 20.1, frozenset([PORT]))])


def seen(ending: Ending = "answered", stage: Stage = "reading", sent: int = len(CONTENT), *outcomes: str) -> Seen:
    return Seen(ASK, ending, stage, 0.0, 1.0, sent, frozenset(outcomes or {Outcome.OK} if ending == "answered" else ()))


def at(began: float, ended: float, each: Seen, port: int = PORT) -> Seen:
    return replace(each, began=began, ended=ended, port=port)


LOST = seen("lost", "waiting")
UNAVAILABLE = replace(seen("answered", "reading", len(CONTENT), Outcome.UNAVAILABLE), ask=STREAM)


def of_stream(each: Seen) -> Entry:
    return Entry(replace(each, ask=STREAM), [OK], RAN)


ENTRIES = {
    "the same": (Entry(seen(), [OK], RAN), "the same"),
    "left": (Entry(seen("left", "waiting"), [CANCELLED], Counter(received=1)), "the client left"),
    "left early": (Entry(seen("left", "sending", 5), [], Counter()), "the client left before the request was read"),
    "cut": (Entry(at(10.5, 10.9, LOST), [OK], RAN), "the connection was cut"),
    "killed": (Entry(at(19.0, 20.2, LOST), [], Counter(received=1)), KILLED),
    "answered and killed": (Entry(at(19.0, 19.9, seen()), [], RAN), KILLED),
    "answered by the other worker": (Entry(at(19.0, 19.9, seen(), port=1), [], RAN), LINE_LOST),
    "stream of a killed worker": (Entry(at(19.0, 26.0, UNAVAILABLE), [], Counter(received=1)), KILLED),
    "reader lost by the killed worker": (of_stream(replace(seen(), breaks=(Break(PORT, 19.0, 20.1),))), "the same"),
    "counted twice": (Entry(seen(), [OK, OK], RAN), UNEXPLAINED),
    "executed twice": (Entry(seen(), [OK], Counter(received=2, answered=2)), UNEXPLAINED),
    "answered but not counted": (Entry(seen(), [], RAN), UNEXPLAINED),
    "answered but not executed": (Entry(seen(), [OK], Counter()), UNEXPLAINED),
    "answered before the model was done": (Entry(seen(), [OK], Counter(received=1)), UNEXPLAINED),
    "counted with another outcome": (Entry(seen(), [CANCELLED], RAN), UNEXPLAINED),
    "a bug": (Entry(seen("answered", "reading", len(CONTENT), Outcome.INTERNAL), [INTERNAL], RAN), UNEXPLAINED),
    "without an end": (Entry(seen("stuck", "waiting"), [OK], RAN), UNEXPLAINED),
    "lost without a fault": (Entry(LOST, [OK], RAN), UNEXPLAINED),
    "answered in part but not counted": (Entry(seen("left", "reading"), [], Counter()), UNEXPLAINED),
    "executed but not counted": (Entry(seen("left", "waiting"), [], Counter(received=1)), UNEXPLAINED),
    "refused but executed": (Entry(seen("left", "waiting"), [INVALID], RAN), UNEXPLAINED),
    "executed half a body": (Entry(seen("left", "sending", 20), [CANCELLED], RAN), UNEXPLAINED),
    "lost by the other worker": (Entry(at(19.0, 20.2, LOST, port=1), [], Counter()), UNEXPLAINED),
    "lost by the replacement": (Entry(at(21.5, 21.6, LOST), [], Counter()), UNEXPLAINED),
    "lost before the kill": (Entry(at(17.0, 18.0, LOST), [], Counter()), UNEXPLAINED),
    "killed, executed twice": (Entry(at(19.0, 20.2, LOST), [], Counter(received=2)), UNEXPLAINED),
    "killed, executed half a body": (Entry(at(19.0, 20.2, replace(LOST, sent=5)), [], RAN), UNEXPLAINED),
    "a line lost before the kill": (Entry(at(17.0, 18.0, seen(), port=1), [], RAN), UNEXPLAINED),
    "killed, answered but not executed": (Entry(at(19.0, 19.9, seen(), port=1), [], Counter()), UNEXPLAINED),
    "a stream of the other worker": (Entry(at(19.0, 26.0, UNAVAILABLE, port=1), [], RAN), UNEXPLAINED),
    "no stream": (Entry(at(19.0, 26.0, replace(UNAVAILABLE, ask=ASK)), [OK], RAN), UNEXPLAINED),
    "stream missing": (of_stream(seen("missing")), UNEXPLAINED),
    "stream never ended": (Entry(replace(seen("left"), ask=STREAM), [], RAN), UNEXPLAINED),
    "stream cancelled without a request": (of_stream(replace(seen(), outcomes=frozenset())), UNEXPLAINED),
    "reader lost by the other worker": (of_stream(replace(seen(), breaks=(Break(1, 19.0, 20.1),))), UNEXPLAINED),
    "reader lost without a fault": (of_stream(replace(seen(), breaks=(Break(PORT, 5.0, 6.0),))), UNEXPLAINED),
}


@pytest.mark.parametrize(("entry", "because"), ENTRIES.values(), ids=ENTRIES)
def test_only_a_difference_with_a_cause_is_explained(entry: Entry, because: str) -> None:
    assert explanation(entry, FAULTS) == because


def test_a_line_of_an_unknown_request_is_unexplained() -> None:
    ledger = Ledger([seen()], {"a": [OK], "b": [OK]}, {"a": RAN, "c": RAN}, FAULTS)
    assert ledger.unexplained() == ["stranger b", "stranger c"]


def test_a_killed_worker_must_have_counted_each_answer_without_a_line() -> None:
    """The metrics must count the second request, and may count the first."""
    asks = [replace(ASK, token=token) for token in "abc"]
    requests = [at(19.0, 20.2, LOST), at(19.0, 19.9, seen(), port=1), seen()]
    clients = [replace(each, ask=ask) for each, ask in zip(requests, asks, strict=True)]
    ledger = Ledger(clients, {"c": [OK]}, {"b": RAN, "c": RAN}, FAULTS)
    assert (ledger.unexplained(), ledger.counted_without_line()) == ([], (1, 2))
