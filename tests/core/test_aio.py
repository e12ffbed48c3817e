"""Background tasks, retry delays, shared answers, rates, and a timeout that restarts with each renewal."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from app.core.aio import LONGEST_S, BackgroundTasks, Backoff, DrainRate, Fresh, IdleTimeout, LeakyBucket
from tests.toolkit.simulated_clock import on_a_simulated_clock


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


@pytest.mark.parametrize(
    ("idle_s", "steps", "ends_s"),
    [
        (0.25, [0.125, IdleTimeout.renew] * 6, None),
        (0.25, [0.125, IdleTimeout.renew, 20.0], 0.375),
        (0.25, [IdleTimeout.pause, 0.5, IdleTimeout.renew, 20.0], 0.75),
        (3600.0, [partial(IdleTimeout.change, idle_s=0.25), IdleTimeout.renew, 20.0], 0.25),
        (0.25, [partial(IdleTimeout.change, idle_s=0.5), IdleTimeout.renew, 20.0], 0.5),
        (0.25, [], None),
    ],
    ids=[
        "each renewal restarts it",
        "once renewed",
        "a pause is not idle",
        "a shorter time",
        "a longer time",
        "no work",
    ],
)
@on_a_simulated_clock
async def test_an_idle_block_ends_after_its_time(
    idle_s: float, steps: list[float | Callable[[IdleTimeout], None]], ends_s: float | None
) -> None:
    """``steps``: pauses in seconds, which the clock counts exactly, and calls. ``ends_s``: when a timeout ends them."""
    loop, ended_s = asyncio.get_running_loop(), None
    began = loop.time()
    try:
        async with IdleTimeout(idle_s) as idle:
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    step(idle)
    except TimeoutError:
        ended_s = loop.time() - began
    await asyncio.sleep(1.0)
    assert ended_s == ends_s


async def test_a_cancellation_takes_precedence_over_the_timeout() -> None:
    async def wait() -> None:
        async with IdleTimeout(0.01):
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.sleep(20)

    task = asyncio.create_task(wait())
    with pytest.raises(asyncio.CancelledError):
        await task
