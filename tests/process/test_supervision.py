"""A background task that ends unexpectedly is logged and ends the process; a stopped task does not."""

import asyncio
import logging

import pytest

from app.process.supervision import BackgroundTaskFailed, Supervisor


async def forever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise ZeroDivisionError("the cause")


async def returning() -> None:
    pass


class Failures:
    count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_a_task_runs_for_the_duration_of_its_block() -> None:
    failures = Failures()
    supervisor = Supervisor(failures)
    async with supervisor.running("watch", forever()):
        (task,) = (each for each in asyncio.all_tasks() if each.get_name() == "watch")
        assert not task.done()
    assert task.cancelled()
    assert failures.count == 0
    supervisor.raise_if_failed()


async def test_a_task_that_raises_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    supervisor = Supervisor(failures)
    async with supervisor.running("watch", failing()):
        await asyncio.sleep(0.01)
        assert failures.count == 1
    (record,) = (each for each in caplog.records if each.levelno == logging.CRITICAL)
    assert "'watch' ended unexpectedly" in record.getMessage()
    assert record.exc_info
    assert isinstance(record.exc_info[1], ZeroDivisionError)
    with pytest.raises(BackgroundTaskFailed):
        supervisor.raise_if_failed()


async def test_a_task_that_returns_too_early_is_a_failure() -> None:
    failures = Failures()
    supervisor = Supervisor(failures)
    async with supervisor.running("server", returning()):
        await asyncio.sleep(0.01)
    assert failures.count == 1
    with pytest.raises(BackgroundTaskFailed):
        supervisor.raise_if_failed()


async def test_only_the_first_failure_is_reported() -> None:
    failures = Failures()
    supervisor = Supervisor(failures)
    async with supervisor.running("one", failing()), supervisor.running("two", failing()):
        await asyncio.sleep(0.01)
    assert failures.count == 1


async def test_a_task_can_be_stopped_with_a_function() -> None:
    stop, failures = asyncio.Event(), Failures()
    supervisor = Supervisor(failures)

    async def until_stopped() -> None:
        await stop.wait()

    async with supervisor.running("server", until_stopped(), stop=stop.set):
        pass
    assert failures.count == 0


async def test_an_error_while_a_task_stops_is_a_failure() -> None:
    async def failing_at_the_end() -> None:
        try:
            await forever()
        finally:
            raise ZeroDivisionError

    supervisor = Supervisor(Failures())
    async with supervisor.running("watch", failing_at_the_end()):
        await asyncio.sleep(0)
    with pytest.raises(BackgroundTaskFailed):
        supervisor.raise_if_failed()


async def test_a_cancellation_from_outside_is_not_swallowed() -> None:
    async def slow_to_stop() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            raise

    async def outer() -> None:
        async with Supervisor(Failures()).running("watch", slow_to_stop()):
            await asyncio.sleep(0.01)

    task = asyncio.create_task(outer())
    await asyncio.sleep(0.03)  # the block has ended and waits for its task
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
