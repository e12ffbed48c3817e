"""The ledger finds unexplained differences."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from app.core.errors import Outcome
from tests.live.chaos import reply
from tests.live.chaos.client import RESUMABLE, WEBSOCKET, Ask, Break, Ending, Manner, Seen, SocketClient, Stage
from tests.live.chaos.ledger import KILLED, LINE_LOST, UNEXPLAINED, Entry, Faults, Kill, Ledger, Line, explanation
from tests.toolkit.websocket_client import CLOSE, FIN, TEXT

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


@pytest.mark.parametrize(
    ("entry", "because"),
    [
        (Entry(seen(), [OK], RAN), "the same"),
        (Entry(seen("left", "waiting"), [CANCELLED], Counter(received=1)), "the client left"),
        (Entry(seen("left", "sending", 5), [], Counter()), "the client left before the request was read"),
        (Entry(at(10.5, 10.9, LOST), [OK], RAN), "the connection was cut"),
        (Entry(at(19.0, 20.2, LOST), [], Counter(received=1)), KILLED),
        (Entry(at(19.0, 19.9, seen()), [], RAN), KILLED),
        (Entry(at(19.0, 19.9, seen(), port=1), [], RAN), LINE_LOST),
        (Entry(at(19.0, 26.0, UNAVAILABLE), [], Counter(received=1)), KILLED),
        (Entry(replace(seen(), ask=STREAM, breaks=(Break(PORT, 19.0, 20.1),)), [OK], RAN), "the same"),
    ],
)
def test_a_difference_with_a_cause_is_explained(entry: Entry, because: str) -> None:
    assert explanation(entry, FAULTS) == because


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
        pytest.param(Entry(LOST, [OK], RAN), id="lost without a fault"),
        pytest.param(Entry(seen("left", "reading"), [], Counter()), id="answered in part but not counted"),
        pytest.param(Entry(seen("left", "waiting"), [], Counter(received=1)), id="executed but not counted"),
        pytest.param(Entry(seen("left", "waiting"), [INVALID], RAN), id="refused but executed"),
        pytest.param(Entry(seen("left", "sending", 20), [CANCELLED], RAN), id="executed half a body"),
    ],
)
def test_everything_else_is_unexplained(entry: Entry) -> None:
    assert explanation(entry, FAULTS) == UNEXPLAINED


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(Entry(at(19.0, 20.2, LOST, port=1), [], Counter()), id="lost by the other worker"),
        pytest.param(Entry(at(21.5, 21.6, LOST), [], Counter()), id="lost by the replacement"),
        pytest.param(Entry(at(17.0, 18.0, LOST), [], Counter()), id="lost before the kill"),
        pytest.param(Entry(at(19.0, 20.2, LOST), [], Counter(received=2)), id="executed twice"),
        pytest.param(Entry(at(19.0, 20.2, replace(LOST, sent=5)), [], RAN), id="executed half a body"),
        pytest.param(Entry(at(17.0, 18.0, seen(), port=1), [], RAN), id="a line lost before the kill"),
        pytest.param(Entry(at(19.0, 19.9, seen(), port=1), [], Counter()), id="answered but not executed"),
        pytest.param(Entry(at(19.0, 26.0, UNAVAILABLE, port=1), [], RAN), id="a stream of the other worker"),
        pytest.param(Entry(at(19.0, 26.0, replace(UNAVAILABLE, ask=ASK)), [OK], RAN), id="no stream"),
    ],
)
def test_a_killed_worker_explains_only_its_own_requests(entry: Entry) -> None:
    assert explanation(entry, FAULTS) == UNEXPLAINED


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(seen("missing"), id="missing"),
        pytest.param(seen("left"), id="never ended"),
        pytest.param(replace(seen(), outcomes=frozenset()), id="cancelled without a request"),
        pytest.param(replace(seen(), breaks=(Break(1, 19.0, 20.1),)), id="a reader lost by the other worker"),
        pytest.param(replace(seen(), breaks=(Break(PORT, 5.0, 6.0),)), id="a reader lost without a fault"),
    ],
)
def test_a_resumable_stream_without_its_end_is_unexplained(each: Seen) -> None:
    lines = [] if each.ending == "left" else [OK]
    assert explanation(Entry(replace(each, ask=STREAM), lines, RAN), FAULTS) == UNEXPLAINED


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


@pytest.mark.parametrize(("first", "stage"), [(CLOSE, "waiting"), (TEXT, "reading")])
async def test_a_close_frame_is_no_answer(first: int, stage: Stage) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
        await reader.readexactly(len(b"body"))
        writer.write(bytes([FIN | first, 2, 3, 0xE9]))
        with suppress(OSError):
            await reader.read()
        writer.close()
        is_over.set()

    is_over = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        seen = await SocketClient(replace(ASK, dialect=WEBSOCKET), Manner(leaves_after_received=1)).run(port)
        await is_over.wait()
    assert (seen.ending, seen.stage) == ("left", stage)
