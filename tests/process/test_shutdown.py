"""Signals, and work that a signal cancels."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from app.process.shutdown import Shutdown, ShutdownRequested


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_second_signal_skips_the_drain(number: signal.Signals) -> None:
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(shutdown.requested.wait(), 10)
        assert not shutdown.hurried.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(shutdown.hurried.wait(), 10)
    finally:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(each)


def test_an_ignored_signal_stays_ignored() -> None:
    """For example, nohup ignores SIGHUP."""
    script = (
        "import asyncio, os, signal\n"
        "from app.process.shutdown import Shutdown\n"
        "async def main():\n"
        "    shutdown = Shutdown(); shutdown.listen_to_signals()\n"
        "    os.kill(os.getpid(), signal.SIGHUP); await asyncio.sleep(0.05)\n"
        "    assert not shutdown.requested.is_set()\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_work_without_a_signal_returns_its_result() -> None:
    async def work() -> int:
        return 7

    assert await Shutdown().unless_requested(work()) == 7


async def test_a_signal_cancels_the_work() -> None:
    shutdown = Shutdown()
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asyncio.get_running_loop().call_later(0.01, shutdown.request)
    with pytest.raises(ShutdownRequested):
        await shutdown.unless_requested(work())
    assert cancelled.is_set()


async def test_an_exception_of_the_work_propagates() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Shutdown().unless_requested(work())
