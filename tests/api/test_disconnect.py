"""A client that goes away cancels the work; anything else that cancels it stays what it is."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from app.api.disconnect import cancelled_on_disconnect
from app.domain.errors import ClientClosedRequest

Receive = Callable[[], Awaitable[Message]]


def receiving(*messages: Message) -> Receive:
    """Gives the messages, then nothing for ever."""
    left = list(messages)

    async def receive() -> Message:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return receive


GONE: Message = {"type": "http.disconnect"}


async def work(receive: Receive, seconds: float) -> str:
    async with cancelled_on_disconnect(receive):
        await asyncio.sleep(seconds)
    return "done"


async def test_work_that_ends_first_is_left_alone() -> None:
    assert await work(receiving(), 0.01) == "done"


async def test_a_client_that_goes_away_cancels_the_work() -> None:
    with pytest.raises(ClientClosedRequest):
        await asyncio.wait_for(work(receiving(GONE), 3600), 20)


async def test_the_task_itself_is_not_left_cancelled() -> None:
    with pytest.raises(ClientClosedRequest):
        await work(receiving(GONE), 3600)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    task = asyncio.create_task(work(receiving(), 3600))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_another_message_is_no_farewell() -> None:
    assert await work(receiving({"type": "http.request", "body": b"", "more_body": False}), 0.01) == "done"


async def test_an_error_of_the_works_own_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        async with cancelled_on_disconnect(receiving()):
            raise ZeroDivisionError


async def test_a_receive_that_fails_is_no_farewell() -> None:
    async def broken() -> Message:
        raise OSError

    assert await work(broken, 0.01) == "done"


async def test_nothing_is_left_behind() -> None:
    before = asyncio.all_tasks()
    await work(receiving(), 0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
