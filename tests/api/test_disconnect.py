"""A disconnect cancels the work and raises ClientClosedRequest; other cancellations raise CancelledError."""

import asyncio

import pytest

from app.api.exchange import CancelledOnDisconnect
from app.core.errors import ClientClosedRequest
from tests.toolkit.exchange import FakeConnection, exchange_with


async def work(connection: FakeConnection, seconds: float) -> str:
    with CancelledOnDisconnect(exchange_with(connection=connection)):
        await asyncio.sleep(seconds)
    return "done"


async def test_a_disconnect_after_the_work_has_no_effect() -> None:
    connection = FakeConnection()
    assert await work(connection, 0.01) == "done"
    connection.lose()
    await asyncio.sleep(0)


async def test_a_disconnect_cancels_the_work() -> None:
    connection = FakeConnection()
    asyncio.get_running_loop().call_later(0.01, connection.lose)
    with pytest.raises(ClientClosedRequest):
        await asyncio.wait_for(work(connection, 3600), 20)


async def test_the_task_can_be_used_after_a_disconnect() -> None:
    connection = FakeConnection()
    connection.lose()
    with pytest.raises(ClientClosedRequest):
        await work(connection, 3600)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_another_cancellation_raises_cancelled_error() -> None:
    task = asyncio.create_task(work(FakeConnection(), 3600))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_exception_of_the_work_is_not_caught() -> None:
    connection = FakeConnection()
    with pytest.raises(ZeroDivisionError), CancelledOnDisconnect(exchange_with(connection=connection)):
        raise ZeroDivisionError
    assert connection.on_lost is None


async def test_watching_the_connection_starts_no_task() -> None:
    before = asyncio.all_tasks()
    with CancelledOnDisconnect(exchange_with(connection=FakeConnection())):
        assert asyncio.all_tasks() == before
