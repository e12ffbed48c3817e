"""Joins the three sides of every request by its id, and has the rules for allowed differences.

Clients: each request ends as ``answered`` (an outcome), ``left`` (the client's own choice), ``lost`` (the connection
broke), ``deleted`` (a resumable stream that its client deleted), ``missing`` (one that is gone without that) or
``stuck``. Gateway: one log line for each request, with the sums in ``requests_total``. Models: a journal of received
and answered requests. A resumable stream is one request, for any number of connections that read it.

| the client | the gateway | a model | reason |
| answered | the same outcome, once | as the outcome says | |
| answered 429 without its id | nothing | nothing | the gateway refused the connection, not the request |
| left while sending | nothing, or cancelled, or refused early | nothing | the gateway never received the whole body |
| left later | nothing, if it was still waiting; else any outcome | as the outcome says | RST discards unread bytes |
| lost during a fault that cuts connections | as if it had left | as if it had left | no more bytes arrive |
| lost, on a killed worker's connection | nothing, or any outcome | at most one execution | |
| answered, on a killed worker's connection | nothing | as the outcome says | killed before it counted the request |
| ``upstream_unavailable``, a stream of a killed worker | nothing, or any outcome | at most one execution | |
| answered just before a worker was killed | counted, but no line | as the outcome says | it had not written its line |

The worker's connections are known exactly: the fault stops the worker, lists them, and then kills it. A connection that
reads or deletes a resumable stream may break only in the same two cases, a cut or its worker's death.

Everything else is unexplained: a second line or a second execution, an answer without a line, another outcome than the
client's, a line or an execution of an unknown request, a connection that is lost without a fault, a request that
takes longer than every deadline, a stream that is missing or cancelled without its client's request, and ``internal``.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.core.errors import Outcome
from tests.live.chaos.client import Break, Seen

Interval = tuple[float, float]
CLOSE_S = 1.0
"""A connection may be lost up to this long after the fault that cut it. A killed worker may lose lines of this time."""
FIRST_MESSAGE = ".1"
"""Ends the id of the first message of a WebSocket. The handshake has a line of its own only if it is refused."""
CONNECT_S = 0.1
"""A connection is on the list of a worker's connections at most this long after its client began to open it."""
UNEXPLAINED = "UNEXPLAINED"
KILLED = "its worker was killed"
LINE_LOST = "its log line was lost with its worker"
_REFUSED_EARLY = {Outcome.CANCELLED, Outcome.CLIENT_ERROR, Outcome.REJECTED, Outcome.UNAVAILABLE}
_UNRECEIVED = {Outcome.CLIENT_ERROR, Outcome.REJECTED}
"""Outcomes of requests that no model receives."""
_BEFORE_CALL = {Outcome.CANCELLED, Outcome.TIMEOUT, Outcome.REJECTED}
_MAYBE_RECEIVED = {Outcome.CANCELLED, Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.MODEL_ERROR}


@dataclass(frozen=True)
class Kill:
    """The death of a worker. ``ports``: of the clients whose connections it had when they were listed."""

    began: float
    ended: float
    ports: frozenset[int]
    listed: float = math.inf


@dataclass(frozen=True)
class Faults:
    """The faults that explain differences. ``cuts``: when connections between client and gateway were being cut."""

    cuts: list[Interval] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def cut(self, connection: Break) -> bool:
        return any(start <= connection.ended and connection.began <= end + CLOSE_S for start, end in self.cuts)

    def killed(self, connection: Break) -> bool:
        """Whether a killed worker had the connection, or may have got it after the list."""
        return any(
            connection.began <= kill.ended
            and kill.began <= connection.ended + CLOSE_S
            and (connection.port in kill.ports or connection.began >= kill.listed - CONNECT_S)
            for kill in self.kills
        )

    def lost_lines(self, time: float) -> bool:
        """Whether the log line of a request that ended then may be lost."""
        return any(kill.began - CLOSE_S <= time <= kill.ended + CLOSE_S for kill in self.kills)


@dataclass(frozen=True)
class Line:
    """The gateway's log line of one request."""

    outcome: str
    code: str
    was_called: bool
    """Whether Triton was called, or at least was about to be, as far as the line says."""


_UNKNOWN = Line(Outcome.CANCELLED, "", was_called=True)
"""Agrees with all that the models may have noted."""


@dataclass(frozen=True)
class Entry:
    seen: Seen
    lines: Sequence[Line]
    events: Counter[str]
    """Of the models."""

    @property
    def client(self) -> str:
        stage = "" if self.seen.ending == "answered" else f" while {self.seen.stage}"
        return f"{self.seen.ending}{stage}"

    @property
    def gateway(self) -> str:
        return " + ".join(line.outcome for line in self.lines) or "nothing"

    @property
    def model(self) -> str:
        last = [event for event in ("answered", "failed", "cancelled") if self.events[event]]
        return "nothing" if not self.events else ", ".join(last) or "received"

    @property
    def connection(self) -> Break:
        """The connection of the request."""
        return Break(self.seen.port, self.seen.began, self.seen.ended)


class Ledger:
    def __init__(
        self,
        seen: Iterable[Seen],
        lines: Mapping[str, Sequence[Line]],
        journal: Mapping[str, Counter[str]],
        faults: Faults,
    ) -> None:
        seen = list(seen)
        tokens = {each.ask.token for each in seen}
        assert len(tokens) == len(seen)
        entries = [Entry(each, lines.get(each.ask.token, ()), journal.get(each.ask.token, Counter())) for each in seen]
        self.explained = [(entry, explanation(entry, faults)) for entry in entries]
        self.strangers = sorted((set(lines) | set(journal)) - tokens)
        """Tokens that no client has sent."""

    @property
    def entries(self) -> list[Entry]:
        return [entry for entry, _ in self.explained]

    def counts(self, field: Literal["outcome", "code"]) -> Counter[str]:
        """How many lines of the log have each outcome, or each code."""
        return Counter(getattr(line, field) for entry in self.entries for line in entry.lines)

    def counted_without_line(self) -> tuple[int, int]:
        """The least and the most requests that a killed worker counted without a line."""
        lost = [why for entry, why in self.explained if not entry.lines and why in {KILLED, LINE_LOST}]
        return lost.count(LINE_LOST), len(lost)

    def calls(self) -> tuple[int, int]:
        """The least and the most that ``triton_calls_total`` may be without repeated calls.

        A request may end after it got its id for Triton, and before its call: its client left, or its deadline passed.
        """
        called = [(entry, line) for entry in self.entries for line in entry.lines if line.was_called]
        maybe = sum(not entry.events and line.outcome in _BEFORE_CALL for entry, line in called)
        return len(called) - maybe, len(called) + self.counted_without_line()[1]

    def refused_connections(self) -> tuple[int, int]:
        """The least and the most connections that the gateway refused: one that broke may have been refused."""
        entries = self.entries
        read = sum((not entry.seen.is_counted) + entry.seen.refused_reads for entry in entries)
        unread = sum((entry.seen.is_counted and not entry.lines) + len(entry.seen.breaks) for entry in entries)
        return read, read + unread

    def rows(self) -> Counter[tuple[str, str, str, str, str]]:
        """Dialect, client, gateway, model and explanation -> how often."""
        return Counter(
            (entry.seen.ask.dialect, entry.client, entry.gateway, entry.model, why) for entry, why in self.explained
        )

    def unexplained(self) -> list[str]:
        found = [entry for entry, why in self.explained if why == UNEXPLAINED]
        shown = [f"{each.seen} gateway {each.gateway}, model {dict(each.events)}" for each in found]
        return shown + [f"stranger {token}" for token in self.strangers]


def explanation(entry: Entry, faults: Faults) -> str:
    seen = entry.seen
    if len(entry.lines) > 1 or entry.events["received"] > 1 or seen.ending in {"stuck", "missing"}:
        return UNEXPLAINED
    if not all(faults.cut(connection) or faults.killed(connection) for connection in seen.breaks):
        return UNEXPLAINED
    return _of_answer(entry, faults) if seen.ending == "answered" else _of_lost(entry, faults)


def _of_lost(entry: Entry, faults: Faults) -> str:
    """Of a request whose client has no complete answer."""
    seen = entry.seen
    why = {"left": "the client left", "lost": "the connection was cut", "deleted": "the client deleted it"}[seen.ending]
    if faults.killed(entry.connection):
        why = KILLED
    elif seen.ending == "lost" and not faults.cut(entry.connection):
        return UNEXPLAINED
    elif not entry.lines:
        is_known = seen.stage == "reading" and (seen.ending == "left" or seen.ask.is_resumable)
        return UNEXPLAINED if is_known or entry.events["received"] else f"{why} before the request was read"
    return why if _agrees(entry.lines[0] if entry.lines else _UNKNOWN, entry) else UNEXPLAINED


def _of_answer(entry: Entry, faults: Faults) -> str:
    seen = entry.seen
    if not seen.is_counted:
        is_refused = seen.outcomes == {Outcome.REJECTED} and not entry.lines and not entry.events
        return "too many connections" if is_refused else UNEXPLAINED
    is_killed = faults.killed(entry.connection)
    if is_killed and seen.ask.is_resumable and seen.outcomes == {Outcome.UNAVAILABLE}:
        return KILLED  # the terminal event is of the reader's process
    if entry.lines:
        is_same = entry.lines[0].outcome in seen.outcomes and _agrees(entry.lines[0], entry)
        return "the same" if is_same else UNEXPLAINED
    if not (is_killed or faults.lost_lines(seen.ended)):
        return UNEXPLAINED
    is_possible = any(_agrees(Line(outcome, "", was_called=True), entry) for outcome in seen.outcomes)
    return UNEXPLAINED if not is_possible else KILLED if is_killed else LINE_LOST


def _agrees(line: Line, entry: Entry) -> bool:
    """Whether the models' journals match the outcome."""
    events = entry.events
    if entry.seen.sent < len(entry.seen.ask.content):
        return line.outcome in _REFUSED_EARLY and not events
    if line.outcome in _UNRECEIVED and line.code != "draining":
        return not events
    if line.outcome == Outcome.OK:
        return events == Counter(received=1, answered=1)
    if line.outcome in {Outcome.EARLY_EXIT, Outcome.CONTRACT_VIOLATION}:
        return events["received"] == 1
    return line.outcome in _MAYBE_RECEIVED or line.code == "draining"


def lines_of(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Line]]:
    """By request id, from the gateway's log. An open breaker refuses a request without an error of a call."""
    found: dict[str, list[Line]] = {}
    for record in records:
        if record.get("transport") is not None:
            is_refused = record["outcome"] == Outcome.UNAVAILABLE and "triton_code" not in record
            was_called = "triton_request_id" in record and not is_refused
            line = Line(record["outcome"], record.get("code", ""), was_called)
            found.setdefault(record["request_id"].removesuffix(FIRST_MESSAGE), []).append(line)
    return found


def journal_of(path: Path) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        token, event = line.split()
        found.setdefault(token, Counter())[event] += 1
    return found
