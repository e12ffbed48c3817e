"""Background tasks, retry delays, shared answers, and rates."""

import asyncio

import pytest

from app.core.aio import LONGEST_S, BackgroundTasks, Backoff, DrainRate, Fresh, LeakyBucket


async def test_closing_waits_for_the_running_tasks_also_after_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    tasks, ended = BackgroundTasks(), asyncio.Event()

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def work() -> None:
        await asyncio.sleep(0.01)
        ended.set()

    tasks.start(fail())
    tasks.start(work())
    await tasks.close()
    assert ended.is_set()
    assert "ZeroDivisionError: a bug" in caplog.text


async def test_one_task_of_a_subject_runs_until_it_is_cancelled() -> None:
    tasks, ended = BackgroundTasks(), list[str]()

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    for name, subject in (("first", "a"), ("second", "a"), ("other", "b"), ("free", None)):
        tasks.start(work(name), subject)
    await asyncio.sleep(0)
    await tasks.close(within_s=0)
    assert ended == ["first", "other", "free"]
    tasks.start(work("later"), "a")
    await asyncio.sleep(0)
    await tasks.close(within_s=0)
    assert ended[-1] == "later"


class TestBackoff:
    @pytest.mark.parametrize(
        ("backoff", "delays"),
        [(Backoff(), [1, 2, 4, 8, 16, 32, 60, 60]), (Backoff(0.5, 3.0), [0.5, 1.0, 2.0, 3.0, 3.0])],
    )
    def test_the_delay_doubles_until_a_reset(self, backoff: Backoff, delays: list[float]) -> None:
        assert backoff.is_due
        assert [backoff.fail() for _ in delays] == delays
        assert not backoff.is_due
        backoff.reset()
        assert backoff.is_due
        assert backoff.fail() == delays[0]

    def test_after_a_time_without_failures_the_delays_begin_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        backoff = Backoff(forgiven_s=10.0)
        assert [backoff.fail(), backoff.fail()] == [1.0, 2.0]
        now[0] += 12.0
        assert backoff.fail() == 4.0
        now[0] += 14.1
        assert backoff.fail() == 1.0


class TestFresh:
    count, fails = 0, False

    async def ask(self) -> int:
        self.count += 1
        await asyncio.sleep(0)
        if self.fails:
            raise ValueError
        return self.count

    async def test_callers_at_the_same_time_get_one_answer_until_it_is_old(self) -> None:
        fresh, old = Fresh(self.ask, 60), Fresh(self.ask, 0)
        assert await asyncio.gather(*(fresh.current() for _ in range(3))) == [1, 1, 1]
        assert [await old.current(), await old.current()] == [2, 3]

    async def test_a_failure_is_not_kept(self) -> None:
        fresh, self.fails = Fresh(self.ask, 60), True
        with pytest.raises(ValueError):  # noqa: PT011 - raised here
            await fresh.current()
        self.fails = False
        assert await fresh.current() == 2


class TestLeakyBucket:
    """Refused requests and cancellations above a rate are delayed."""

    @pytest.mark.parametrize(
        ("times", "delays"),
        [
            ([50.0] * 10, [0.0] * 10),
            ([50.0 + 0.0101 * number for number in range(1000)], [0.0] * 1000),
            ([50.0] * 60, [0.0] * 10 + [0.01 * (number + 1) for number in range(50)]),
            ([50.0] * 5000 + [52.0], [0.0] * 10 + [min(0.01 * (number + 1), 1.0) for number in range(4990)] + [0.0]),
        ],
        ids=["burst", "steady rate", "excess", "longest delay"],
    )
    def test_events_are_delayed(self, times: list[float], delays: list[float]) -> None:
        bucket = LeakyBucket(per_s=100, burst=10, longest_s=1.0)
        assert [max(bucket.turn(now) - now, 0.0) for now in times] == pytest.approx(delays)


@pytest.mark.parametrize(
    ("per_second", "amount", "now", "expected"),
    [(10.0, 50.0, 30.0, (5, 6)), (1e9, 1.0, 30.0, (1,)), (0.0, 1.0, 1.0, (1,)), (10.0, 50.0, 300.0, (LONGEST_S,))],
    ids=["recent rate", "at least a second", "nothing measured", "no recent outflow"],
)
def test_the_retry_time_follows_from_the_recent_outflow(
    per_second: float, amount: float, now: float, expected: tuple[int, ...]
) -> None:
    outflow = DrainRate()
    for tenth in range(300 if per_second else 0):
        outflow.left(per_second / 10, tenth / 10)
    assert outflow.retry_after_s(amount, now) in expected
