"""Requests run, wait or are rejected, and every slot is released exactly once."""

import asyncio
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission.admission import Admission, Share
from app.admission.keys import ANYONE, CallerLimits, Key
from app.admission.scheduler import PipelineAdmission, Slot
from app.core.errors import DeadlineExceeded, TooManyRequests, UpstreamUnavailable
from app.core.inference import Deadline
from app.core.model import Capacity
from tests.toolkit.keys import key_with

LONG_S = 60.0


def pipeline_of(
    admission: Admission, name: str = "p", model: str = "m", *, per_key: int | None = None, queue: int | None = None
) -> PipelineAdmission:
    pipeline = admission.of(name, model, Capacity(), 2)
    pipeline.set_limits(2, queue, per_key)
    return pipeline


@pytest.fixture
def pipeline() -> PipelineAdmission:
    """A pipeline whose model has two slots."""
    return pipeline_of(Admission())


async def entered(pipeline: PipelineAdmission, caller: Key = ANYONE, deadline_s: float = LONG_S) -> Slot:
    return await pipeline.claim_of(caller).enter(Deadline.after(deadline_s))


def entering(pipeline: PipelineAdmission, caller: Key = ANYONE, deadline_s: float = LONG_S) -> asyncio.Task[Slot]:
    return asyncio.create_task(entered(pipeline, caller, deadline_s))


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def run_for(pipeline: PipelineAdmission, seconds: float) -> None:
    """Simulates one request of a given duration."""
    slot = await entered(pipeline)
    slot.since -= seconds
    slot.leave()


class TestSlots:
    async def test_a_further_request_waits_for_a_slot(self, pipeline: PipelineAdmission) -> None:
        first, _ = (pipeline.claim_of(ANYONE).try_enter() for _ in range(2))
        assert first is not None
        waiting = entering(pipeline)
        await turn()
        assert (pipeline.own.running, pipeline.own.waiting) == (2, 1)
        assert not waiting.done()
        first.leave()
        assert (await waiting).since > first.since
        assert (pipeline.own.running, pipeline.own.waiting) == (2, 0)

    async def test_a_failed_request_releases_its_slot_once(self, pipeline: PipelineAdmission) -> None:
        slot = await entered(pipeline)
        slot.leave(UpstreamUnavailable("away"))
        slot.leave(TimeoutError())
        assert pipeline.model_queue.running == 0

    @pytest.mark.parametrize(("model", "waits"), [("m", True), ("n", False)])
    async def test_pipelines_over_one_model_share_its_slots(self, model: str, waits: bool) -> None:
        admission = Admission()
        pipeline, other = pipeline_of(admission), pipeline_of(admission, "other", model)
        await entered(pipeline)
        await entered(other)
        waiting = entering(pipeline)
        await turn()
        assert waiting.done() is not waits

    async def test_a_higher_limit_lets_waiting_requests_run_at_once(self) -> None:
        admission = Admission()
        pipeline = pipeline_of(admission)
        for _ in range(2):
            await entered(pipeline)
        waiting = entering(pipeline)
        await turn()
        admission.of("p", "m", Capacity(), 3)
        pipeline.set_limits(3)
        await asyncio.wait_for(waiting, 1)


class TestWorkers:
    @pytest.mark.parametrize(("total", "shares"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1, 1]), (0, [0, 0, 0])])
    def test_the_shares_of_a_limit_add_up_unless_there_are_more_workers(self, total: int, shares: list[int]) -> None:
        assert [Admission(Share(number, 3)).share(total) for number in (1, 2, 3)] == shares

    async def test_together_the_workers_run_as_many_requests_as_the_limit(self) -> None:
        ran = 0
        for number in (1, 2):
            pipeline = Admission(Share(number, 2)).of("p", "m", Capacity(), 5)
            pipeline.set_limits(5, per_key=3)
            while pipeline.claim_of(key_with("a")).try_enter():
                ran += 1
        assert ran == 3
        assert pipeline.model_queue.limit.value == 2


class TestLeaving:
    async def test_a_cancelled_request_leaves_the_queue(self, pipeline: PipelineAdmission) -> None:
        first, _ = [await entered(pipeline) for _ in range(2)]
        cancelled, next_one = entering(pipeline), entering(pipeline)
        await turn()
        cancelled.cancel()
        await turn()
        assert pipeline.own.waiting == 1
        first.leave()
        await asyncio.wait_for(next_one, 1)
        assert pipeline.model_queue.running == 2

    @pytest.mark.parametrize("slot_first", [True, False])
    async def test_a_request_cancelled_in_the_same_turn_releases_its_slot(
        self, pipeline: PipelineAdmission, *, slot_first: bool
    ) -> None:
        first, second = [await entered(pipeline) for _ in range(2)]
        cancelled = entering(pipeline)
        await turn()
        steps = [first.leave, cancelled.cancel]
        for step in steps if slot_first else reversed(steps):
            step()
        await turn()
        assert cancelled.cancelled()
        assert pipeline.model_queue.running == 1
        second.leave()
        assert pipeline.model_queue.running == pipeline.own.running == pipeline.own.waiting == 0

    async def test_a_request_that_times_out_in_the_queue_never_runs(self, pipeline: PipelineAdmission) -> None:
        first, _ = [await entered(pipeline) for _ in range(2)]
        with pytest.raises(DeadlineExceeded):
            await entered(pipeline, deadline_s=0.05)
        first.leave()
        assert (pipeline.model_queue.running, pipeline.own.waiting) == (1, 0)


class TestRefusals:
    async def test_a_full_queue_rejects_requests(self) -> None:
        pipeline = pipeline_of(Admission(), queue=1)
        for _ in range(2):
            await entered(pipeline)
        entering(pipeline)
        await turn()
        with pytest.raises(TooManyRequests) as refused:
            pipeline.claim_of(ANYONE).check(Deadline.after(LONG_S))
        assert refused.value.retry_after_s == 1
        with pytest.raises(TooManyRequests):
            await entered(pipeline)

    async def test_an_unreachable_deadline_is_rejected_at_once(self, pipeline: PipelineAdmission) -> None:
        await run_for(pipeline, 2.0)
        for _ in range(2):
            await entered(pipeline)
        with pytest.raises(TooManyRequests):
            await entered(pipeline, deadline_s=2.5)
        waiting = entering(pipeline, deadline_s=10.0)
        await turn()
        assert not waiting.done()

    async def test_a_free_slot_is_used_for_any_deadline(self, pipeline: PipelineAdmission) -> None:
        """Otherwise the gateway would not detect that the model is fast again."""
        await run_for(pipeline, 30.0)
        assert await entered(pipeline, deadline_s=1.0)

    async def test_a_request_that_waited_too_long_is_rejected(self, pipeline: PipelineAdmission) -> None:
        first, second = [await entered(pipeline) for _ in range(2)]
        waiting = entering(pipeline, deadline_s=1.0)
        await turn()
        first.since -= 5.0
        first.leave()
        with pytest.raises(TooManyRequests):
            await waiting
        second.leave()
        assert pipeline.model_queue.running == 0

    async def test_retry_times_of_rejected_callers_differ(self, pipeline: PipelineAdmission) -> None:
        """A slot becomes free every second, and two callers get the same retry time."""
        await run_for(pipeline, 2.0)
        for _ in range(2):
            await entered(pipeline)
        for _ in range(5):
            entering(pipeline)
        await turn()
        times = []
        for _ in range(100):
            with pytest.raises(TooManyRequests) as refused:
                pipeline.claim_of(ANYONE).check(Deadline.after(LONG_S))
            times.append(refused.value.retry_after_s)
        assert times == sorted(times)
        assert times[5] >= 3
        assert times[-1] == 30

    async def test_an_error_of_a_full_triton_queue_has_a_retry_time(self, pipeline: PipelineAdmission) -> None:
        await run_for(pipeline, 30.0)
        slot = await entered(pipeline)
        error = TooManyRequests("The model's queue in Triton is full.")
        slot.leave(error)
        assert 7 <= error.retry_after_s <= 8


class TestKeys:
    FLOOD, OTHER = key_with("flood"), key_with("other")

    async def test_callers_take_turns_behind_a_higher_priority(self, pipeline: PipelineAdmission) -> None:
        slot, _ = [await entered(pipeline, self.FLOOD) for _ in range(2)]
        flood = [entering(pipeline, self.FLOOD) for _ in range(20)]
        await turn()
        other, high = entering(pipeline, self.OTHER), entering(pipeline, key_with("high", priority=1))
        await turn()
        for now, later in pairwise((high, flood[0], other, flood[1])):
            slot.leave()
            slot = await asyncio.wait_for(now, 1)
            assert not later.done()

    async def test_a_check_displaces_no_request(self) -> None:
        """The caller of the check has not sent its body, and may never send it."""
        pipeline = pipeline_of(Admission(), queue=4)
        waiting = await self.full_queue(pipeline)
        for caller in (self.OTHER, key_with("first", priority=1)):
            pipeline.claim_of(caller).check(Deadline.after(LONG_S))
        await turn()
        assert [each.done() for each in waiting] == [False] * 4

    @pytest.mark.parametrize("priority", [0, 1])
    async def test_a_rejected_request_displaces_no_request(self, priority: int) -> None:
        pipeline = pipeline_of(Admission(), queue=4)
        await run_for(pipeline, 2.0)
        waiting = await self.full_queue(pipeline)
        for enter in (entering(pipeline, key_with("other", priority), deadline_s=2.5), self.check(pipeline, priority)):
            with pytest.raises(TooManyRequests):
                await enter
        assert [each.done() for each in waiting] == [False] * 4

    async def full_queue(self, pipeline: PipelineAdmission) -> list[asyncio.Task[Slot]]:
        for _ in range(2):
            await entered(pipeline, self.FLOOD)
        waiting = [entering(pipeline, self.FLOOD) for _ in range(4)]
        await turn()
        return waiting

    @staticmethod
    async def check(pipeline: PipelineAdmission, priority: int) -> None:
        pipeline.claim_of(key_with("other", priority)).check(Deadline.after(2.5))

    async def test_a_request_takes_the_place_of_the_one_that_it_displaces(self) -> None:
        """Its expected wait is that of the displaced request, 3 s, not of a further one."""
        pipeline = pipeline_of(Admission(), queue=4)
        await run_for(pipeline, 1.5)
        waiting = await self.full_queue(pipeline)
        first = entering(pipeline, key_with("first", priority=1), deadline_s=6.1)
        await turn()
        assert [each.done() for each in (*waiting, first)] == [False, False, False, True, False]
        assert isinstance(waiting[-1].exception(), TooManyRequests)

    async def test_the_limit_of_a_key_covers_all_pipelines(self) -> None:
        admission = Admission()
        caller = key_with("a", limits=CallerLimits(in_flight=1, queue=1))
        here, there = pipeline_of(admission), pipeline_of(admission, "q", "n")
        slot = await entered(here, caller)
        waiting = entering(there, caller)
        await turn()
        assert not waiting.done()
        with pytest.raises(TooManyRequests):
            await entered(there, caller)
        slot.leave()
        (await asyncio.wait_for(waiting, 1)).leave()

    @pytest.mark.parametrize("is_rising", [False, True])
    async def test_the_refusal_of_a_full_key_names_it_and_its_time(
        self, pipeline: PipelineAdmission, monkeypatch: pytest.MonkeyPatch, is_rising: bool
    ) -> None:
        """One stream at a time, of 13.9 s: the next one in 14 s, and further refused ones later."""
        monkeypatch.setattr(pipeline.model_queue.limit, "rising_s", inf if is_rising else 0.0)
        await run_for(pipeline, 13.9)
        caller = key_with("a", limits=CallerLimits(in_flight=1, queue=0))
        await entered(pipeline, caller)
        times = []
        for _ in range(3):
            with pytest.raises(TooManyRequests, match="This API key has reached its own limit") as refused:
                pipeline.claim_of(caller).check(Deadline.after(LONG_S))
            times.append(refused.value.retry_after_s)
        assert times == [14, 21, 28]
        pipeline.claim_of(self.OTHER).check(Deadline.after(LONG_S))

    async def test_a_long_wait_for_the_limit_of_a_key_names_the_key(self, pipeline: PipelineAdmission) -> None:
        await run_for(pipeline, 20.0)
        caller = key_with("a", limits=CallerLimits(in_flight=1))
        await entered(pipeline, caller)
        with pytest.raises(TooManyRequests, match="limit of its API key"):
            pipeline.claim_of(caller).check(Deadline.after(10.0))

    async def test_requests_that_wait_for_their_key_do_not_block_others(self) -> None:
        pipeline = pipeline_of(Admission(), queue=1)
        await run_for(pipeline, 20.0)
        caller = key_with("a", limits=CallerLimits(in_flight=1))
        await entered(pipeline, caller)
        waiting = entering(pipeline, caller)
        await turn()
        pipeline.claim_of(self.OTHER).check(Deadline.after(1.0))
        await asyncio.wait_for(entered(pipeline, self.OTHER, deadline_s=1.0), 1)
        assert not waiting.done()

    async def test_per_key_limits_each_key_of_a_pipeline(self) -> None:
        pipeline = pipeline_of(Admission(), per_key=1)
        await entered(pipeline, self.FLOOD)
        waiting = entering(pipeline, self.FLOOD)
        await turn()
        assert not waiting.done()
        await asyncio.wait_for(entered(pipeline, self.OTHER), 1)

    async def test_a_new_per_key_applies_to_keys_that_are_known(self) -> None:
        admission = Admission()
        (await entered(pipeline_of(admission), self.FLOOD)).leave()
        pipeline = pipeline_of(admission, per_key=1)
        assert pipeline.claim_of(self.FLOOD).try_enter() is not None
        assert pipeline.claim_of(self.FLOOD).try_enter() is None
        assert pipeline_of(admission).claim_of(self.FLOOD).try_enter() is not None


callers = [
    ANYONE,
    key_with("a"),
    key_with("b", priority=1),
    key_with("c", limits=CallerLimits(in_flight=1)),
    key_with("d", limits=CallerLimits(in_flight=1, queue=2)),
]
steps = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(callers), st.integers(0, 2)),
    st.tuples(st.just("leave"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.booleans()),
)


@settings(max_examples=150)
@given(st.lists(steps, max_size=50))
def test_every_slot_is_released_exactly_once(history: list[tuple]) -> None:
    asyncio.run(_replay(history))


async def _replay(history: list[tuple]) -> None:
    admission = Admission()
    pipelines = [
        pipeline_of(admission, "p", "m", per_key=2, queue=5),
        pipeline_of(admission, "q", "m", queue=5),
        pipeline_of(admission, "r", "n", queue=5),
    ]
    tasks, slots = list[asyncio.Task[Slot]](), list[Slot]()
    for kind, which, more in history:
        if kind == "enter":
            tasks.append(entering(pipelines[more], which))
        elif kind == "cancel" and tasks:
            tasks[which % len(tasks)].cancel()
        elif kind == "leave" and slots:
            slots.pop(which % len(slots)).leave(UpstreamUnavailable("away") if more else None)
        if kind != "cancel" or more:
            await turn()
        for task in [each for each in tasks if each.done()]:
            tasks.remove(task)
            if not task.cancelled() and task.exception() is None:
                slots.append(task.result())
        queues = admission.model_queues.values()
        assert all(each.running <= 2 for each in queues)
        uncollected = sum(each.done() and not each.cancelled() and each.exception() is None for each in tasks)
        assert sum(each.running for each in queues) == len(slots) + uncollected
    for task in tasks:
        task.cancel()
    await turn()
    for slot in (*slots, *(task.result() for task in tasks if not task.cancelled() and not task.exception())):
        slot.leave()
    await turn()
    accounts = [pipeline.own for pipeline in pipelines]
    assert [(each.running, each.waiting) for each in accounts] == [(0, 0)] * 3
    assert [(each.running, each._queue.size) for each in admission.model_queues.values()] == [(0, 0)] * 2
