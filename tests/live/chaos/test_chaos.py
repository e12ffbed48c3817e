"""After faults under load every request is explained, and the gateway has no more objects than before.

The ledger finds unexplained differences.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.errors import Outcome
from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions
from tests.live.chaos import stand as stands
from tests.live.chaos.client import RESUMABLE, Ask, Break, Ending, Seen, Stage, of_pipeline
from tests.live.chaos.faults import FAULTS, SHARING_FAULTS, WORKER_FAULTS, Fault, cutting
from tests.live.chaos.ledger import KILLED, LINE_LOST, UNEXPLAINED, Entry, Faults, Kill, Ledger, Line, explanation
from tests.live.chaos.report import LONG_S, SEED, write_ledger, write_part
from tests.live.chaos.stand import RESTARTS, Levels, Stand, levels_of, rss_mib_of, stand_of
from tests.live.chaos.traffic import FOREIGN, SharingTraffic, Traffic
from tests.live.test_coalescing import GATEWAY_YAML, write_models
from tests.toolkit.processes import running_triton

CALM = 150
CLIENTS = 12
"""For each of the two ways to the gateway, directly and through the link."""
PAUSE_S = 0.01
"""Between two requests of a client."""
SHORT_CLIENTS = 6
"""In the short form: what has to start or to recover gets twice as much of a small processor."""
WORKER_CLIENTS, WORKER_PAUSE_S = 8, 0.05
"""With several workers: a load that leaves time of the processor for a worker that starts."""
SHARING_CLIENTS = 16
GROWTH_MIB, FIRST_GROWTH_MIB = 8.0, 24.0
"""By faults that were caused before, and by the first of each kind: that needs memory that stays.

On an idle machine, 17 to 20 MiB stay after the first faults, and 0.5 MiB more after 42,000 requests of further ones."""
SHORT_S = 0.3
"""How long each fault of the short form, and of the first round of the long form, lasts."""
SHORT = [
    "Triton is stopped",
    "link to Triton: blackhole",
    "link to Triton: resets",
    "link to clients: blackhole",
    "link to clients: resets",
    "more connections than allowed",
    "more requests than slots",
    "no descriptors",
    "log pipe blocked",
    "gateway.yaml changes",
    "Triton is killed",
]
WORKER_SHORT = ["Redis is stopped", "Redis and a worker are killed"]
LONG = [pytest.mark.full, pytest.mark.timeout(LONG_S + 600)]

mortal_triton = stands.mortal_triton()


@pytest.mark.parametrize(
    ("has_workers", "is_long"),
    [
        pytest.param(False, False, id="one process"),
        pytest.param(True, False, id="workers and Redis", marks=pytest.mark.full),
        pytest.param(False, True, id="one process, long", marks=LONG),
        pytest.param(True, True, id="workers and Redis, long", marks=LONG),
    ],
)
async def test_a_round_of_faults_leaves_nothing_unexplained(
    mortal_triton: EmbeddedTriton, tmp_path: Path, request: pytest.FixtureRequest, has_workers: bool, is_long: bool
) -> None:
    redis = request.getfixturevalue("redis") if has_workers else None
    faults, short = (WORKER_FAULTS, WORKER_SHORT) if has_workers else (FAULTS, SHORT)
    settings = {"workers": "2"} if has_workers else {}
    async with stand_of(mortal_triton, tmp_path / "stand", SEED, redis=redis, **settings) as stand:
        if is_long:
            first = [(fault, SHORT_S) for fault in faults.values()]
            before, after = await balanced(stand, in_any_order(faults), warm_up=first)
            part = ("1-workers", "Two workers and Redis") if has_workers else ("1-ledger", "One process")
            write_ledger(*part, stand, before, after)
        else:
            await balanced(stand, [(faults[name], SHORT_S) for name in short], SHORT_CLIENTS)


@pytest.mark.full
@pytest.mark.timeout(LONG_S + 600)
async def test_faults_give_no_caller_the_answer_of_another(models_venv: Path, tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    with running_triton(EmbeddedOptions(tmp_path / "models", models_venv, **RESTARTS), restarts=True) as triton:
        async with stand_of(triton, tmp_path / "stand", SEED, GATEWAY_YAML) as stand:
            traffic = SharingTraffic(SEED, stand.journal)
            await chaos(stand, traffic, in_any_order(SHARING_FAULTS), SHARING_CLIENTS)
            await stand.quiet()
            shared = stand.gateway.metric("coalesced_requests_total", model="good")
            rss_mib = rss_mib_of(stand.process)
    ends = Counter(str(each.status or each.ending) for each in stand.seen)
    assert not any(FOREIGN in each.outcomes for each in stand.seen)
    assert set(ends) <= {"200", "left", "429", "502", "503", "504"}, ends
    assert shared > ends["200"] / 4
    failed = ends.total() - ends["200"] - ends["left"]
    result = f"answered {ends['200']:,}, left {ends['left']:,}, failed {failed:,}; **0 answers of another request**"
    asked = f"{LONG_S:g} s of faults: {ends.total():,} ({shared:,.0f} shared a call)"
    write_part("1-coalesced", ("Requests that share calls", asked, result, f"{rss_mib:.1f}"))


def in_any_order(faults: Mapping[str, Fault]) -> Iterator[tuple[Fault, float]]:
    """Every fault once, each round in a different order, for LONG_S seconds."""
    order, ends = random.Random(SEED), time.monotonic() + LONG_S
    while time.monotonic() < ends:
        yield from ((fault, order.uniform(0.2, 3.0)) for fault in order.sample(list(faults.values()), len(faults)))


async def balanced(
    stand: Stand,
    faults: Iterable[tuple[Fault, float]],
    clients: int = CLIENTS,
    warm_up: Iterable[tuple[Fault, float]] = (),
) -> tuple[Levels, Levels]:
    """Causes the faults, then drains the gateway under load. Returns its objects before and after the faults.

    With several workers no client leaves before its answer: each request that ends without a line was in a killed one.
    The memory before is that after the faults of ``warm_up``.
    """
    traffic = Traffic(SEED, stand.journal, clients_leave=stand.redis is None)
    await calm(stand, traffic)
    await stand.quiet()
    before = await asyncio.to_thread(levels_of, stand.gateway)
    if warm_up:
        await chaos(stand, traffic, warm_up, clients)
        await stand.quiet()
        before = replace(before, rss_mib=(await levels_like(stand, before, FIRST_GROWTH_MIB)).rss_mib)
    await chaos(stand, traffic, faults, clients)
    await calm(stand, traffic)
    await stand.quiet()
    after = await levels_like(stand, before, GROWTH_MIB if warm_up else FIRST_GROWTH_MIB)
    check_sums(stand)
    async with cutting(stand), loading(stand, traffic, clients):
        await asyncio.sleep(0.3)
        stand.gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stand.gateway.process.wait, 20) == 0
    assert stand.ledger().unexplained() == []  # the metrics have ended with the gateway
    return before, after


async def calm(stand: Stand, traffic: Traffic) -> None:
    """Without faults every client receives the scripted answer."""
    begun = len(stand.seen)
    await stand.load(traffic.calm(CALM), CLIENTS)
    for seen in stand.seen[begun:]:
        assert seen.ask.expected in seen.outcomes, seen


async def chaos(stand: Stand, traffic: Traffic, faults: Iterable[tuple[Fault, float]], clients: int) -> None:
    """Causes each fault under load. ``faults``: with their durations in seconds."""
    async with loading(stand, traffic, clients):
        for fault, lasts_s in faults:
            await fault(stand, traffic, lasts_s)


@asynccontextmanager
async def loading(stand: Stand, traffic: Traffic, count: int) -> AsyncIterator[None]:
    """Clients send requests for the duration of the block, directly and through the link.

    With several workers all clients connect directly, so that a worker's connections name its clients.
    """
    is_over = False

    async def client(port: int) -> None:
        while not is_over:
            await stand.ask(*traffic.ask(), port=port)
            await asyncio.sleep(WORKER_PAUSE_S if stand.redis else PAUSE_S)

    both = [stand.port, stand.to_gateway.port] * count
    ports = [stand.port] * min(count, WORKER_CLIENTS) if stand.redis else both
    clients = [asyncio.create_task(client(port)) for port in ports]
    yield
    is_over = True
    await asyncio.gather(*clients)


async def levels_like(stand: Stand, before: Levels, growth_mib: float) -> Levels:
    """Waits until the gateway has no more objects and memory than before.

    One call is always allowed, because the gateway periodically asks whether Triton is live. Freed memory goes back to
    the system some time after the last large request.
    """
    after, has_more = before, True
    for _ in range(100):
        after = await asyncio.to_thread(levels_of, stand.gateway)
        has_more = not Counter(after.tasks) <= Counter(before.tasks) or after.calls > max(before.calls, 1)
        has_more |= after.descriptors > before.descriptors or after.rss_mib > before.rss_mib + growth_mib
        if not has_more:
            break
        await asyncio.sleep(0.2)
    assert not has_more, (before, after)
    assert after.threads <= before.threads + 2
    return after


def check_sums(stand: Stand) -> None:
    """Compares the gateway's metrics with the ledger: exactly, or as exactly as the other sides can know them."""
    ledger, gateway = stand.ledger(), stand.gateway
    assert ledger.unexplained() == []
    counted = Counter({outcome: int(gateway.metric("requests_total", outcome=outcome)) for outcome in Outcome})
    outcomes = ledger.counts("outcome")
    assert outcomes <= counted
    fewest, most = ledger.counted_without_line()
    assert fewest <= counted.total() - outcomes.total() <= most
    fewest, most = ledger.calls()
    assert fewest <= gateway.metric("triton_calls_total") <= most + gateway.metric("triton_repeats_total")
    fewest, most = ledger.refused_connections()
    refused = gateway.metric("rejected_total", reason="too_many_requests") - ledger.counts("code")["too_many_requests"]
    assert fewest <= refused <= most
    assert gateway.metric("log_lines_dropped_total") == 0


CONTENT = b"POST / HTTP/1.1\r\n\r\nbody"
ASK = Ask("a", "unary", CONTENT, of_pipeline, Outcome.OK)
STREAM = replace(ASK, dialect=RESUMABLE)
OK = Line(Outcome.OK, "", was_called=True)
CANCELLED = Line(Outcome.CANCELLED, "client_closed_request", was_called=True)
INVALID = Line(Outcome.CLIENT_ERROR, "invalid_input", was_called=False)
INTERNAL = Line(Outcome.INTERNAL, "internal", was_called=True)
RAN = Counter(received=1, answered=1)
PORT = 50_000
"""A connection of the worker that is killed at 20 s."""
ONE_OF_EACH = Faults([(10.0, 11.0)], [Kill(20.0, 20.1, frozenset([PORT]))])


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
    assert explanation(entry, ONE_OF_EACH) == because


def test_a_line_of_an_unknown_request_is_unexplained() -> None:
    ledger = Ledger([seen()], {"a": [OK], "b": [OK]}, {"a": RAN, "c": RAN}, ONE_OF_EACH)
    assert ledger.unexplained() == ["stranger b", "stranger c"]


def test_a_killed_worker_must_have_counted_each_answer_without_a_line() -> None:
    """The metrics must count the second request, and may count the first."""
    asks = [replace(ASK, token=token) for token in "abc"]
    requests = [at(19.0, 20.2, LOST), at(19.0, 19.9, seen(), port=1), seen()]
    clients = [replace(each, ask=ask) for each, ask in zip(requests, asks, strict=True)]
    ledger = Ledger(clients, {"c": [OK]}, {"b": RAN, "c": RAN}, ONE_OF_EACH)
    assert (ledger.unexplained(), ledger.counted_without_line()) == ([], (1, 2))
