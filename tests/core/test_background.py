"""Closing waits for background tasks and logs their unexpected exceptions."""

import asyncio

import pytest

from app.core.aio import BackgroundTasks


async def test_closing_waits_for_the_running_tasks() -> None:
    tasks, ended = BackgroundTasks(), asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        ended.set()

    tasks.start(work())
    await tasks.close()
    assert ended.is_set()


async def test_an_unexpected_exception_does_not_stop_closing(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    tasks.start(fail())
    tasks.start(asyncio.sleep(0.01))
    await tasks.close()
    assert "ZeroDivisionError: a bug" in caplog.text
