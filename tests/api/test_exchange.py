"""One request: its headers, its deadline, the memory that it holds, and a client that disconnects."""

import asyncio

import pytest

from app.api.body_memory import ByteBudget
from app.api.exchange import CancelledOnDisconnect
from app.core.errors import ClientClosedRequest, InvalidRequest
from tests.toolkit.exchange import FakeConnection, exchange_with
from tests.toolkit.gateway import Served


async def test_samples_use_the_scheme_of_a_trusted_proxy(api: Served) -> None:
    answer = await api.client.get("/v1/pipelines/read", headers={"X-Forwarded-Proto": "https"})
    assert "https://gateway/v1/pipelines/read" in answer.json()["samples"]["curl"]


async def test_the_first_of_two_headers_with_one_name_is_used() -> None:
    exchange = exchange_with([("x-request-timeout", "1"), ("x-request-timeout", "2")])
    assert exchange.header(b"x-request-timeout") == "1"


async def test_held_bytes_are_released_when_the_exchange_ends() -> None:
    budget = ByteBudget(100)
    exchange = exchange_with(budget=budget)
    exchange.hold(60)
    assert budget.taken == 60
    exchange.close()
    assert budget.taken == 0


def remaining(asked: str | None, timeout_s: float = 30) -> float:
    headers = [] if asked is None else [("x-request-timeout", asked)]
    return exchange_with(headers).deadline(timeout_s).remaining_s()


async def test_the_default_is_the_pipelines_deadline() -> None:
    assert remaining(None) == pytest.approx(30, abs=1)


async def test_a_caller_can_shorten_the_deadline_but_not_extend_it() -> None:
    assert remaining("2.5") == pytest.approx(2.5, abs=1)
    assert remaining("1e9") == pytest.approx(30, abs=1)


async def test_a_very_short_deadline_becomes_the_minimum() -> None:
    assert 0 < remaining("1e-300") <= 0.05


@pytest.mark.parametrize("asked", ["", "0", "-1", "nan", "inf", "-inf", "1e999", "soon", "1s", "1,5", "0x1"])
async def test_only_positive_numbers_are_accepted(asked: str) -> None:
    with pytest.raises(InvalidRequest):
        remaining(asked)


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
