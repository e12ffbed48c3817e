"""The logs of events, and every way a stream can end.

Events are numbered from 1; the last event is the only terminal event.
"""

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from app.core.answer import Ending
from app.core.errors import (
    ClientClosedRequest,
    ContractViolation,
    DeadlineExceeded,
    Draining,
    GatewayError,
    ModelError,
    Outcome,
    SlowConsumer,
    StreamEvicted,
    UpstreamUnavailable,
)
from app.core.inference import Deadline, InferenceResponse
from app.streams.stream import MAX_READ_BYTES, Event, LiveLog, ReplayLog
from tests.toolkit.engine import Answer
from tests.toolkit.models import response, tensor
from tests.toolkit.streams import EXIT, FINAL, FakeAnswer, Life, ids, live, stream_of, token
from tests.toolkit.waiting import until


def output(number: int, size: int = 10) -> Event:
    return Event(number, "output", b"x" * size)


def done(number: int) -> Event:
    return Event(number, "done", b"{}")


class TestLiveLog:
    async def test_a_read_timeout_loses_no_events(self) -> None:
        log = LiveLog()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await log.read(0)
        log.append(output(1))
        assert ids(await log.read(0)) == [1]

    async def test_a_full_log_has_room_after_its_events_are_sent(self) -> None:
        log = LiveLog(max_unread_bytes=25)
        log.append(output(1))
        assert not log.is_full
        log.append(output(2))
        assert log.is_full
        waiting = asyncio.create_task(log.room())
        assert ids(await log.read(0)) == [1, 2]
        await asyncio.sleep(0)
        assert not waiting.done()
        reading = asyncio.create_task(log.read(2))
        await waiting
        log.append(output(3))
        assert ids(await reading) == [3]

    async def test_one_read_is_limited_in_size(self) -> None:
        log = LiveLog(max_unread_bytes=10 * MAX_READ_BYTES)
        for number, size in enumerate((MAX_READ_BYTES - 10, 10, 1, 2 * MAX_READ_BYTES, 1), 1):
            log.append(output(number, size))
        assert [ids(await log.read(0)) for _ in range(4)] == [[1, 2], [3], [4], [5]]

    async def test_one_output_of_any_size_and_the_terminal_event_always_have_room(self) -> None:
        log = LiveLog(max_unread_bytes=20)
        assert not log.is_full
        log.append(output(1, 100))
        assert log.is_full
        log.append(done(2))
        assert ids(await log.read(0)) == [1, 2]

    async def test_read_events_count_until_the_next_read(self) -> None:
        log = LiveLog(max_unread_bytes=10 * MAX_READ_BYTES)
        log.append(output(1, 6 * MAX_READ_BYTES))
        log.append(output(2, 4 * MAX_READ_BYTES))
        assert log.is_full
        for number in (1, 2):
            assert ids(await log.read(number - 1)) == [number]
            assert log.is_full is (number == 1)


class TestReplayLog:
    async def test_all_waiting_readers_get_an_event(self) -> None:
        log = ReplayLog()
        readers = [asyncio.create_task(log.read(0)) for _ in range(3)]
        await asyncio.sleep(0)
        log.append(output(1))
        assert [ids(await each) for each in readers] == [[1]] * 3

    async def test_reading_dropped_events_raises_stream_evicted(self) -> None:
        log = ReplayLog(max_bytes=25)
        for number in range(1, 5):
            log.append(output(number))
        assert ids(await log.read(2)) == [3, 4]
        with pytest.raises(StreamEvicted):
            await log.read(1)
        with pytest.raises(StreamEvicted):
            log.resume(0)

    async def test_a_read_of_a_long_log_is_limited(self) -> None:
        log = ReplayLog()
        for number in range(1, 8):
            log.append(output(number, 100_000))
        log.append(done(8))
        assert [ids(await log.read(after)) for after in (0, 2, 6, 7)] == [[1, 2], [3, 4], [7, 8], [8]]

    @pytest.mark.parametrize("after", [0, 1, 4_000, 9_000, 9_999])
    async def test_reads_continue_after_any_event(self, after: int) -> None:
        log = ReplayLog()
        for number in range(1, 10_001):
            log.append(output(number))
        log.append(done(10_001))
        found: list[int] = []
        while not found or found[-1] < 10_001:
            found += ids(await log.read(found[-1] if found else after))
        assert found == list(range(after + 1, 10_002))

    async def test_an_event_above_the_limit_is_kept_alone(self) -> None:
        log = ReplayLog(max_bytes=25)
        log.append(output(1))
        log.append(output(2, 100))
        assert ids(await log.read(1)) == [2]
        log.append(done(3))
        assert ids(await log.read(1)) == [2, 3]

    def test_a_running_stream_can_resume_at_its_newest_event(self) -> None:
        log = ReplayLog()
        assert log.resume(0)
        log.append(output(1))
        assert log.resume(1)


class TestGoodEndings:
    async def test_outputs_are_followed_by_done(self) -> None:
        life = live(token(1), token(2), FINAL)
        assert await life.events() == [
            (1, "output", {"T": [1]}),
            (2, "output", {"T": [2]}),
            (3, "done", {"reason": "complete", "early_exit": None, "outputs": 2, "request_id": "rid"}),
        ]
        assert life.stream.outcome is Outcome.OK
        assert life.stream.abandonments == 0
        assert life.engine.closed == 1

    async def test_buffered_values_are_sent_before_the_end(self) -> None:
        life = live(token(1), FINAL, answer=FakeAnswer(Ending(None, [{"T": ["\ufffd"]}])))
        assert [name for _, name, _ in await life.events()] == ["output", "output", "done"]

    async def test_an_exit_before_any_output_is_the_empty_result(self) -> None:
        for life in (live(EXIT), live(FINAL, answer=FakeAnswer(Ending("nothing")))):
            assert await life.events() == [
                (1, "output", {"T": []}),
                (2, "done", {"reason": "early_exit", "early_exit": "nothing", "outputs": 1, "request_id": "rid"}),
            ]
            assert life.stream.outcome is Outcome.EARLY_EXIT
            assert life.stream.early_exit == "nothing"

    async def test_an_exit_after_outputs_only_adds_done(self) -> None:
        life = live(token(1), EXIT)
        assert [name for _, name, _ in await life.events()] == ["output", "done"]

    async def test_a_complete_answer_cancels_a_running_model(self) -> None:
        life = live(token(1), token(2), token(3), FINAL, answer=FakeAnswer(enough_at=2))
        assert await life.ending() == "complete"
        assert (life.stream.seen_outputs, life.stream.abandonments, life.engine.closed) == (2, 1, 1)

    async def test_a_complete_answer_does_not_cancel_a_finished_model(self) -> None:
        last = response(tensor("T", "INT32", [2]), is_final=True)
        life = live(token(1), last, answer=FakeAnswer(enough_at=2))
        assert await life.ending() == "complete"
        assert (life.stream.seen_outputs, life.stream.abandonments) == (2, 0)

    async def test_numpy_arrays_and_nan_are_encoded(self) -> None:
        nan = response(tensor("T", "FP32", [np.nan, 1.5]), is_final=False)
        assert (await live(nan, FINAL).events())[0] == (1, "output", {"T": [None, 1.5]})

    async def test_a_large_array_is_one_event(self) -> None:
        large = response(tensor("T", "INT32", range(20_000)), is_final=False)
        assert (await live(large, token(1), FINAL).events())[:2] == [
            (1, "output", {"T": list(range(20_000))}),
            (2, "output", {"T": [1]}),
        ]

    async def test_a_stream_may_end_while_a_large_array_is_written(self) -> None:
        life = live(response(tensor("T", "FP32", np.zeros(10_000_000)), is_final=False), 3600.0)
        await asyncio.sleep(0.05)
        life.stream.end(Draining("stopping"))
        assert [name for _, name, _ in await life.events()] == ["error"]


class TestBadEndings:
    @pytest.mark.parametrize("before", [[], [token(1)], [token(1), token(2)]])
    @pytest.mark.parametrize(
        ("error", "abandoned"), [(ModelError("no"), 0), (UpstreamUnavailable("gone"), 0), (DeadlineExceeded("late"), 1)]
    )
    async def test_an_error_of_triton_is_the_terminal_event(
        self, before: list[Answer], error: GatewayError, abandoned: int
    ) -> None:
        """The model may still compute after a passed deadline."""
        life = live(*before, error)
        assert await life.ending() == error.code
        assert life.stream.error is error
        assert life.stream.outcome is error.outcome
        assert (life.stream.seen_outputs, life.stream.abandonments) == (len(before), abandoned)

    async def test_the_memory_of_the_last_response_is_freed(self) -> None:
        large = tensor("T", "FP32", [0.0])
        held = weakref.ref(large.array)
        life = live(response(large, is_final=False), 0.1, answer=FakeAnswer(breaks=SlowConsumer("")))
        await life.ending()
        life.engine.answers.clear()
        del large
        assert held() is None
        assert isinstance(life.stream.error, SlowConsumer)

    async def test_a_contract_violation_cancels_the_model(self) -> None:
        life = live(token(1), 3600.0, answer=FakeAnswer(breaks=ContractViolation("grew", tensor="T")))
        assert await life.ending() == "contract_violation"
        assert life.stream.abandonments == 1
        assert life.engine.closed == 1

    async def test_an_unexpected_exception_is_internal(self, caplog: pytest.LogCaptureFixture) -> None:
        life = live(token(1), 3600.0, answer=FakeAnswer(breaks=ZeroDivisionError()))
        assert await life.ending() == "internal"
        assert life.stream.abandonments == 1
        assert "a stream failed" in caplog.text

    async def test_a_value_that_cannot_be_encoded_is_internal(self) -> None:
        answer = FakeAnswer(Ending(None, [{"T": object()}]))
        assert await live(FINAL, answer=answer).ending() == "internal"


class TestEnd:
    CAUSES = (ClientClosedRequest("gone"), Draining("bye"), SlowConsumer("slow"))

    @pytest.mark.parametrize("cause", CAUSES)
    async def test_end_stops_a_stream(self, cause: GatewayError) -> None:
        """While the model runs, while the log is full, and before the first step."""
        running, full, starting = live(token(1), 3600.0), slowly_read(), live(token(1), FINAL)
        starting.stream.end(cause)
        for life, is_there in ((running, lambda: running.stream.seen_outputs), (full, lambda: full.log.is_full)):
            await until(is_there)
            life.stream.end(cause)
            assert await life.ending() == cause.code
            assert life.stream.error is cause
            assert (life.stream.abandonments, life.engine.closed) == (1, 1)
        assert await starting.ending() == cause.code
        assert starting.engine.requests == []

    async def test_only_the_first_end_counts(self) -> None:
        life, ended = live(3600.0), live(token(1), FINAL)
        await ended.stream.ended()
        for cause in self.CAUSES:
            life.stream.end(cause)
            ended.stream.end(cause)
        assert [await life.ending(), await ended.ending()] == [self.CAUSES[0].code, "complete"]

    async def test_end_works_at_any_time(self) -> None:
        for steps in range(12):
            life = live(token(1), 0.0, token(2), 0.0, FINAL)
            for _ in range(steps):
                await asyncio.sleep(0)
            life.stream.end(self.CAUSES[1])
            assert await life.ending() in {"draining", "complete"}

    async def test_a_cancelled_task_ends_with_cancelled(self) -> None:
        life = live(3600.0)
        task = next(each for each in asyncio.all_tasks() if "Stream._run" in repr(each))
        await asyncio.sleep(0)
        task.cancel()
        assert await life.ending() == "cancelled"

    async def test_end_has_no_effect_before_the_start(self) -> None:
        async def none() -> AsyncGenerator[InferenceResponse]:
            return
            yield

        stream = stream_of(none(), FakeAnswer())
        stream.end(self.CAUSES[0])
        await stream.ended()
        assert stream.outcome is None


def slowly_read(**options: Any) -> Life:
    """Starts a stream of ten outputs, whose log has room for three."""
    answers = [*(token(value) for value in range(10)), FINAL]
    return live(*answers, log=LiveLog(max_unread_bytes=30), **options)


@pytest.mark.parametrize(
    ("answers", "first_s", "progress_s", "outputs", "ending"),
    [
        ([token(1), 0.05, token(2), 0.05, token(3), 3600.0], 0.2, 0.2, 3, "The model was silent for 0.2 s."),
        ([3600.0], 0.02, 0.02, 0, "The model was silent for 0.02 s."),
        ([3600.0], 0.05, 3600, 0, "The model was silent for 0.05 s."),
        ([0.15, token(1), 3600.0], 3600, 0.05, 1, "The model was silent for 0.05 s."),
        ([token(1), 0.15, token(2), FINAL], 0.1, 3600, 2, "complete"),
    ],
    ids=["each response restarts the time", "none in time", "no first", "a late first", "a late second"],
)
async def test_a_model_may_be_silent_for_a_limited_time(
    answers: list[Answer], first_s: float, progress_s: float, outputs: int, ending: str
) -> None:
    """Before the first output, and between two outputs."""
    life = live(*answers, first_s=first_s, progress_s=progress_s)
    reason = await life.ending()
    assert life.stream.seen_outputs == outputs
    if life.stream.error is None:
        assert reason == ending
    else:
        assert (reason, life.stream.error.detail) == ("deadline_exceeded", ending)
        assert (life.stream.abandonments, life.engine.closed) == (1, 1)


class TestASlowReader:
    """The stream waits while its log is full. The response decides when a reader is too slow."""

    async def test_unread_events_are_limited_without_loss(self) -> None:
        life = slowly_read()
        events: list[Event] = []
        while not (events and events[-1].is_terminal):
            await until(lambda: life.log.is_full or life.stream.outcome)
            assert life.stream.seen_outputs - len(events) <= 3
            events += await life.log.read(len(events))
        assert [event.id for event in events] == list(range(1, 12))
        assert life.stream.outcome is Outcome.OK

    async def test_waiting_for_the_reader_is_not_idle_time_of_the_model(self) -> None:
        life = slowly_read(progress_s=0.05)
        await asyncio.sleep(0.2)
        assert life.stream.outcome is None
        life.stream.end(SlowConsumer("slow"))
        assert await life.ending() == "slow_consumer"

    async def test_the_progress_timeout_restarts_after_the_wait(self) -> None:
        life = live(*[token(value) for value in range(4)], 3600.0, log=LiveLog(max_unread_bytes=30), progress_s=0.05)
        await until(lambda: life.log.is_full)
        assert [event.id for event in await life.log.read(0)] == [1, 2, 3]
        assert [event.id for event in await life.log.read(3)] == [4]
        await life.stream.ended()
        assert isinstance(life.stream.error, DeadlineExceeded)
        assert "silent" in life.stream.error.detail

    @pytest.mark.parametrize(
        ("is_behind", "ending"),
        [(lambda _: True, "slow_consumer"), (lambda value: value % 4, "complete"), (lambda _: False, "complete")],
        ids=["always", "until it catches up", "never"],
    )
    async def test_a_reader_may_lag_behind_the_model_for_a_limited_time(
        self, is_behind: Callable[[int], object], ending: str
    ) -> None:
        """Only the time counts in which Triton keeps responses for the reader, and only until it has caught up."""
        answers = [structs.replace(token(value), is_behind=bool(is_behind(value))) for value in range(200)]
        life = live(*answers, FINAL, log=LiveLog(max_unread_bytes=30), lag_s=0.5)
        events: list[Event] = []
        while not (events and events[-1].is_terminal):
            await until(lambda: life.log.is_full or life.stream.outcome)
            await asyncio.sleep(0.02)
            events += await life.log.read(len(events))
        terminal = json.loads(events[-1].data)
        assert terminal.get("reason", terminal.get("code")) == ending

    async def test_the_deadline_interrupts_the_wait(self) -> None:
        life = slowly_read(deadline=Deadline.after(0.05))
        assert await life.ending() == "deadline_exceeded"
        assert life.stream.abandonments == 1


async def test_own_time_does_not_include_the_time_of_triton() -> None:
    life = live(0.05, token(1), FINAL)
    await life.stream.ended()
    assert 0 < life.stream.own_s < 0.05
