"""Background tasks and signals."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from app.process.supervision import ShutdownRequested, Supervisor


async def forever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise ZeroDivisionError("the cause")


async def returning() -> None:
    pass


async def test_a_task_runs_for_the_duration_of_its_block() -> None:
    """Its end is a cancellation, or a function that stops it."""
    supervisor, stop = Supervisor(), asyncio.Event()

    async def until_stopped() -> None:
        await stop.wait()

    async with (
        supervisor.running("watch", forever()),
        supervisor.running("server", until_stopped(), stop=stop.set),
    ):
        watch, server = (
            each for name in ("watch", "server") for each in asyncio.all_tasks() if each.get_name() == name
        )
        assert not watch.done()
        assert not server.done()
    assert (watch.cancelled(), server.cancelled()) == (True, False)
    assert not supervisor.requested.is_set()
    assert not supervisor.has_failed


@pytest.mark.parametrize(("work", "cause"), [(failing, ZeroDivisionError), (returning, type(None))])
async def test_a_task_that_ends_is_logged_and_ends_the_process(
    caplog: pytest.LogCaptureFixture, work: Callable[[], Coroutine[Any, Any, None]], cause: type
) -> None:
    supervisor = Supervisor()
    async with supervisor.running("watch", work()), supervisor.running("other", work()):
        await asyncio.sleep(0.01)
        assert (supervisor.requested.is_set(), supervisor.hurried.is_set()) == (True, False)
    record, _ = (each for each in caplog.records if each.levelno == logging.CRITICAL)
    assert "'watch' ended unexpectedly" in record.getMessage()
    assert isinstance(record.exc_info and record.exc_info[1], cause)
    assert supervisor.has_failed


async def test_an_error_while_a_task_stops_is_a_failure() -> None:
    async def failing_at_the_end() -> None:
        try:
            await forever()
        finally:
            raise ZeroDivisionError

    supervisor = Supervisor()
    async with supervisor.running("watch", failing_at_the_end()):
        await asyncio.sleep(0)
    assert supervisor.has_failed


async def test_a_cancellation_from_outside_is_not_swallowed() -> None:
    async def slow_to_stop() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            raise

    async def outer() -> None:
        async with Supervisor().running("watch", slow_to_stop()):
            await asyncio.sleep(0.01)

    task = asyncio.create_task(outer())
    await asyncio.sleep(0.03)  # the block has ended and waits for its task
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_second_signal_skips_the_drain(number: signal.Signals) -> None:
    supervisor = Supervisor()
    supervisor.listen_to_signals()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(supervisor.requested.wait(), 10)
        assert not supervisor.hurried.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(supervisor.hurried.wait(), 10)
    finally:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(each)


def test_an_ignored_signal_stays_ignored() -> None:
    """For example, nohup ignores SIGHUP."""
    script = (
        "import asyncio, os, signal\n"
        "from app.process.supervision import Supervisor\n"
        "async def main():\n"
        "    supervisor = Supervisor(); supervisor.listen_to_signals()\n"
        "    os.kill(os.getpid(), signal.SIGHUP); await asyncio.sleep(0.05)\n"
        "    assert not supervisor.requested.is_set()\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_work_has_its_result_unless_a_signal_cancels_it() -> None:
    supervisor = Supervisor()
    assert await supervisor.unless_requested(asyncio.sleep(0, 7)) == 7
    with pytest.raises(ZeroDivisionError):
        await supervisor.unless_requested(failing())
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asyncio.get_running_loop().call_later(0.01, supervisor.request)
    with pytest.raises(ShutdownRequested):
        await supervisor.unless_requested(work())
    assert cancelled.is_set()
