"""One session without Triton: turns, repeated steps, lost states, and the time until it expires.

The places of sessions: never more than the models have, at the Triton with the most free ones.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pytest

from app.admission.admission import WHOLE, Share
from app.admission.keys import ANYONE, CallerLimits, Key
from app.api.sessions.open_sessions import LONGEST_RETRY_S, USUAL_RETRY_S, Place, Places
from app.core.answer import WholeAnswer
from app.core.errors import (
    ContractViolation,
    DeadlineExceeded,
    GatewayError,
    ModelError,
    ModelNotReady,
    TooManyRequests,
    UpstreamUnavailable,
)
from app.core.inference import Deadline, InferenceRequest, OpenSequence
from app.core.model import SequenceIds
from app.sessions import session as session_module
from app.sessions.session import (
    LARGEST_KEPT_BYTES,
    MOST_WAITING,
    AnswerMemory,
    End,
    PipelineSession,
    SessionLost,
    SessionSpec,
    SessionTerms,
    StepOutOfTurn,
    UnknownSession,
    reach_s,
)
from tests.toolkit.keys import key_with
from tests.toolkit.simulated_clock import on_a_simulated_clock

REQUEST = InferenceRequest("m", ())


def terms(idle_s: float = 30.0, max_s: float = 600.0, triton_idle_s: float = 60.0) -> SessionTerms:
    return SessionTerms(SessionSpec(idle_s=idle_s, max_s=max_s), {"m": 1}, SequenceIds(), triton_idle_s, triton_idle_s)


@dataclass
class Model:
    """Runs the steps of one session, and keeps the requests that were sent."""

    given: SessionTerms = field(default_factory=terms)
    sent: list[InferenceRequest] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    memory: AnswerMemory = field(default_factory=AnswerMemory)

    def __post_init__(self) -> None:
        self.session = PipelineSession(
            "id", self.given, 7, OpenSequence(), self.memory, lambda _, end: self.ends.append(end)
        )
        # the defaults of these fields read the clock of the machine, also on a simulated clock
        self.session.opened_at = self.session._idle_since = session_module.monotonic()

    async def step(
        self,
        number: int | None = None,
        *,
        is_last: bool = False,
        deadline_s: float = 5.0,
        before: "Obstacle" = None,
        after: "Obstacle" = None,
        rest: "Obstacle" = None,
        streams: bool = False,
        body: bytes = b"",
    ) -> WholeAnswer:
        """What happens before the request is sent, ``after`` it, and of a stream after its first output."""
        begun = asyncio.get_running_loop().create_future() if streams else None

        async def run() -> WholeAnswer:
            await _passed(before)
            self.sent.append(self.session.prepared(REQUEST))
            await _passed(after)
            if begun is not None:
                begun.set_result(None)
            await _passed(rest)
            return WholeAnswer(body or b"%d" % len(self.sent))

        deadline = Deadline.after(deadline_s)
        return await self.session.step(run, deadline, number, is_last=is_last, begun=begun)

    async def begin(self, number: int | None = None, **options: Any) -> WholeAnswer:
        return await self.step(number, streams=True, **options)

    async def expire(self) -> None:
        """Returns when the session has ended."""
        async with asyncio.timeout(1000):
            while not self.ends:
                await asyncio.sleep(0.01)
                self.session.expire()

    @property
    def flags(self) -> list[set[str]]:
        return [set(each.parameters) - {"sequence_id"} for each in self.sent]


Obstacle = asyncio.Event | GatewayError | Callable[[], Awaitable[None]] | None


async def _passed(obstacle: Obstacle) -> None:
    if isinstance(obstacle, GatewayError):
        raise obstacle
    if obstacle is not None:
        await (obstacle.wait() if isinstance(obstacle, asyncio.Event) else obstacle())


async def test_a_streamed_step_begins_with_its_first_output_and_keeps_its_turn() -> None:
    model, gate = Model(), asyncio.Event()
    await model.begin(1, rest=gate)
    waiting = asyncio.create_task(model.step(2))
    await asyncio.sleep(0.01)
    assert (len(model.sent), model.session.steps) == (1, 0)
    gate.set()
    await waiting
    assert (len(model.sent), model.session.steps) == (2, 2)


@pytest.mark.parametrize("rest", [None, ModelError("failed")])
async def test_the_answer_of_a_streamed_step_is_not_kept(rest: GatewayError | None) -> None:
    model = Model()
    await model.step(1)
    await model.begin(2, rest=rest)
    for repeat in (model.begin, model.step):
        with pytest.raises(StepOutOfTurn) as caught:
            await repeat(2)
        assert caught.value.last_step == 2
    assert (len(model.sent), model.memory.used) == (2, 0)


async def test_a_refused_streamed_step_leaves_the_kept_answer() -> None:
    model = Model()
    first = await model.step(1)
    with pytest.raises(StepOutOfTurn):
        await model.begin(1)
    with pytest.raises(TooManyRequests):
        await model.begin(2, before=TooManyRequests("full"))
    assert await model.step(1) == first


async def test_an_error_before_the_first_output_is_raised() -> None:
    model = Model()
    with pytest.raises(ModelError):
        await model.begin(after=ModelError("failed"))
    assert model.session.steps == 1


@pytest.mark.parametrize(("is_sent", "steps"), [(True, 1), (False, 0)])
async def test_only_a_streamed_step_that_was_sent_goes_on_after_the_deadline(is_sent: bool, steps: int) -> None:
    model, gate = Model(), asyncio.Event()
    with pytest.raises(DeadlineExceeded):
        await model.begin(deadline_s=0.05, before=None if is_sent else gate, after=gate if is_sent else None)
    gate.set()
    await model.session.settle()
    assert (len(model.sent), model.session.steps) == (steps, steps)


async def test_the_first_step_starts_and_the_last_ends_the_sequence() -> None:
    model = Model()
    for is_last in (False, False, True):
        await model.step(is_last=is_last)
    assert model.flags == [{"sequence_start"}, set(), {"sequence_end"}]
    assert {each.parameters["sequence_id"] for each in model.sent} == {7}
    assert (model.ends, model.session.sequence.is_forgotten, model.session.steps) == ([End.LAST_STEP], True, 3)
    with pytest.raises(UnknownSession):
        await model.step()


@pytest.mark.parametrize("error", [ModelError("failed"), ContractViolation("too many", tensor="TEXT")])
async def test_the_start_flag_is_not_repeated_after_a_failed_first_step(error: GatewayError) -> None:
    """The model has a state then, which a second start flag would drop."""
    model = Model()
    with pytest.raises(type(error)):
        await model.step(after=error)
    await model.step()
    assert model.flags == [{"sequence_start"}, set()]


async def test_a_step_that_triton_did_not_take_is_no_step() -> None:
    model = Model()
    with pytest.raises(TooManyRequests):
        await model.step(1, before=TooManyRequests("busy"))
    assert model.session.queued_at is None
    with pytest.raises(TooManyRequests):
        await model.step(1, after=TooManyRequests("the queue of Triton is full"))
    assert (await model.step(1)).body == b"2"
    await model.step()
    assert model.flags == [{"sequence_start"}, {"sequence_start"}, set()]
    assert model.session.steps == 2


async def test_a_repeated_step_gets_the_kept_answer_or_error() -> None:
    model = Model()
    first = await model.step(1)
    assert await model.step(1) == first
    with pytest.raises(ModelError):
        await model.step(2, after=ModelError("failed"))
    with pytest.raises(ModelError):
        await model.step(2)
    last = await model.step(3, is_last=True)
    assert await model.step(3, is_last=True) == last
    assert len(model.sent) == 3
    model.session.forget()
    assert model.memory.used == 0


@pytest.mark.parametrize("number", [1, 2, 4, 9])
async def test_a_step_out_of_turn_names_the_last_one(number: int) -> None:
    model = Model()
    await model.step(1)
    await model.step()
    with pytest.raises(StepOutOfTurn) as caught:
        await model.step(number)
    assert caught.value.last_step == 2


async def test_a_large_answer_is_not_kept() -> None:
    model = Model()
    await model.step(1, body=bytes(LARGEST_KEPT_BYTES + 1))
    with pytest.raises(StepOutOfTurn):
        await model.step(1)
    full = Model(memory=AnswerMemory(limit=3))
    await full.step(1, body=b"four")
    with pytest.raises(StepOutOfTurn):
        await full.step(1)
    assert full.memory.used == 0


async def test_a_sent_step_goes_on_without_its_caller() -> None:
    model, gate = Model(), asyncio.Event()
    with pytest.raises(DeadlineExceeded):
        await model.step(1, deadline_s=0.05, after=gate)
    leaving = asyncio.create_task(model.step(1))
    await asyncio.sleep(0)
    leaving.cancel()
    again = asyncio.create_task(model.step(1))
    await asyncio.sleep(0)
    gate.set()
    assert (await again).body == b"1"
    assert (len(model.sent), model.session.steps) == (1, 1)


async def test_a_step_that_was_not_sent_ends_with_its_caller() -> None:
    model = Model()
    leaving = asyncio.create_task(model.step(1, before=asyncio.Event()))
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert (await model.step(1)).body == b"1"


async def test_few_steps_wait_for_their_turn() -> None:
    model, gate = Model(), asyncio.Event()
    steps = [asyncio.create_task(model.step(after=gate)) for _ in range(MOST_WAITING + 1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(StepOutOfTurn):
        await model.step()
    gate.set()
    assert [each.body for each in await asyncio.gather(*steps)] == [b"%d" % number for number in range(1, 10)]


async def test_a_lost_sequence_ends_the_session() -> None:
    model = Model()
    await model.step(1)

    async def lose() -> None:
        model.session.sequence.is_lost = True

    for number in (2, 2, 3, 1):
        with pytest.raises(SessionLost) as caught:
            await model.step(number, after=lose) if number != 1 else await model.step(4)
        assert caught.value.last_step == 1
    assert (model.ends, len(model.sent)) == ([End.LOST], 2)


@pytest.mark.parametrize("is_started", [True, False])
async def test_a_session_that_triton_does_not_know_cannot_be_lost(*, is_started: bool) -> None:
    model = Model()
    if is_started:
        await model.step()
    model.session.sequence.is_lost = True
    with pytest.raises(SessionLost if is_started else UpstreamUnavailable):
        await model.step(after=UpstreamUnavailable("Triton cannot be reached.", was_sent=False))
    assert (model.session.ended, model.session.queued_at is None) == (End.LOST if is_started else None, not is_started)


@pytest.mark.parametrize(("steps", "reason"), [(0, End.IDLE), (1, End.LOST)])
@on_a_simulated_clock
async def test_a_session_that_expires_while_triton_cannot_be_reached_is_lost(steps: int, reason: End) -> None:
    model = Model(terms())
    for _ in range(steps):
        await model.step()
    with pytest.raises(UpstreamUnavailable):
        await model.step(after=UpstreamUnavailable("Triton cannot be reached.", was_sent=False))
    await model.expire()
    assert model.ends == [reason]


@pytest.mark.parametrize(
    ("given", "ends_after_s", "reason"),
    [
        (terms(triton_idle_s=600), 130, End.IDLE),
        (terms(triton_idle_s=60), 100, End.IDLE),
        (terms(triton_idle_s=600, max_s=110), 110, End.MAX),
    ],
)
@on_a_simulated_clock
async def test_a_session_expires_after_its_last_step(given: SessionTerms, ends_after_s: float, reason: End) -> None:
    """Steps come for longer than ``idle_s``, and the last one takes longer. Triton counts from when it was queued."""
    model, loop = Model(given), asyncio.get_running_loop()
    started = loop.time()
    for _ in range(3):
        await model.step()
        await asyncio.sleep(10)
    await model.step(after=lambda: asyncio.sleep(70), deadline_s=100)
    assert model.session.expires_in_s == pytest.approx(ends_after_s - 100, abs=0.01)
    await model.expire()
    assert (model.ends, round(loop.time() - started)) == ([reason], ends_after_s)


@on_a_simulated_clock
async def test_a_running_step_holds_off_the_end() -> None:
    model = Model(terms(idle_s=1))
    await model.step()

    async def wait() -> None:
        await asyncio.sleep(10)
        model.session.expire()
        assert model.ends == []
        model.session.close(End.DELETED)

    await model.step(after=wait, deadline_s=20)
    await model.session.settle()
    assert model.ends == [End.DELETED]


def of_slots(*slots: int, max_open: int | None = None) -> SessionTerms:
    by_model = {f"m{number}": each for number, each in enumerate(slots)}
    return SessionTerms(SessionSpec(max_open=max_open), by_model, SequenceIds(), 60.0, 60.0)


def key(name: str, most: int | None = None) -> Key:
    return key_with(name, limits=CallerLimits(sessions=most))


def taken(places: Places, given: SessionTerms, *homes: str, pipeline: str = "p", caller: Key = ANYONE) -> list[Place]:
    """As many places as there are."""
    found = []
    try:
        while True:
            found.append(places.take(pipeline, given, homes or ("",), len(homes) or 1, caller))
    except TooManyRequests:
        return found


@pytest.mark.parametrize(("given", "count"), [(of_slots(3), 3), (of_slots(3, 2), 2), (of_slots(5, max_open=2), 2)])
def test_the_narrowest_limit_counts(given: SessionTerms, count: int) -> None:
    places = Places(WHOLE)
    found = taken(places, given)
    assert len(found) == count
    places.release(found[0])
    assert len(taken(places, given)) == 1


def test_pipelines_over_one_model_share_its_places() -> None:
    places = Places(WHOLE)
    assert len(taken(places, of_slots(4, max_open=1), pipeline="a")) == 1
    assert len(taken(places, of_slots(4), pipeline="b")) == 3


@pytest.mark.parametrize(("total", "workers"), [(1, 3), (4, 3), (64, 4), (2, 2)])
def test_workers_together_never_have_more_places(total: int, workers: int) -> None:
    parts = [len(taken(Places(Share(number, workers)), of_slots(total))) for number in range(1, workers + 1)]
    assert sum(parts) == total


def test_a_session_goes_to_the_triton_with_the_most_free_places() -> None:
    places = Places(WHOLE)
    found = taken(places, of_slots(6), "a:1", "b:1")
    assert sorted(each.address for each in found) == ["a:1"] * 3 + ["b:1"] * 3
    for each in found:
        if each.address == "b:1":
            places.release(each)
    assert [each.address for each in taken(places, of_slots(6), "a:1", "b:1")] == ["b:1"] * 3
    with pytest.raises(ModelNotReady):
        places.take("p", of_slots(6), (), 2)


def test_a_refusal_tells_when_a_place_is_free() -> None:
    places = Places(WHOLE)
    (place,) = taken(places, of_slots(1))
    for until, expected in ((7.5, 8), (0.1, 1), (1000, LONGEST_RETRY_S)):
        places.free_at[place] = monotonic() + until
        with pytest.raises(TooManyRequests) as caught:
            places.take("p", of_slots(1), ("",), 1)
        assert caught.value.retry_after_s == expected
    places.release(place)
    taken(places, of_slots(1))
    with pytest.raises(TooManyRequests) as caught:
        places.take("p", of_slots(1), ("",), 1)
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
    first = taken(places, of_slots(8), caller=key("a", most))
    assert len(first) == counts[0]
    assert len(taken(places, of_slots(8), caller=key("b", counts[1]))) == counts[1]
    assert len(taken(places, of_slots(8))) == 8 - counts[0] - counts[1]
    places.release(first[0])
    assert len(taken(places, of_slots(8), caller=key("a", most))) == 1


def test_a_key_can_use_the_only_place() -> None:
    assert len(taken(Places(WHOLE), of_slots(1), caller=key("a"))) == 1


def test_the_limit_of_a_key_counts_the_sessions_of_all_models() -> None:
    places, caller = Places(WHOLE), key("a", 3)
    assert len(taken(places, of_slots(2), caller=caller)) == 2
    other = SessionTerms(SessionSpec(), {"other": 8}, SequenceIds(), 60.0, 60.0)
    assert len(taken(places, other, pipeline="other", caller=caller)) == 1
    with pytest.raises(TooManyRequests, match="this API key"):
        places.take("p", other, ("",), 1, caller)
