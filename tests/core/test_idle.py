"""A timeout that restarts with each renewal."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.core.aio import IdleTimeout


async def in_block(idle_s: float, work: Callable[[IdleTimeout], Awaitable[None]]) -> None:
    async with IdleTimeout(idle_s) as idle:
        await work(idle)


async def test_each_renewal_restarts_the_timeout() -> None:
    async with IdleTimeout(0.2) as idle:
        for _ in range(6):
            await asyncio.sleep(0.05)
            idle.renew()


async def test_the_time_starts_at_the_last_renewal() -> None:
    loop = asyncio.get_running_loop()
    renewed = loop.time()

    async def renew_once(idle: IdleTimeout) -> None:
        nonlocal renewed
        await asyncio.sleep(0.06)
        idle.renew()
        renewed = loop.time()
        await asyncio.sleep(20)

    with pytest.raises(TimeoutError):
        await in_block(0.1, renew_once)
    assert loop.time() - renewed >= 0.1


async def test_a_pause_does_not_count_as_idle() -> None:
    async def pause(idle: IdleTimeout) -> None:
        idle.pause()
        await asyncio.sleep(0.15)
        idle.renew()
        paused.append(True)
        await asyncio.sleep(20)

    paused: list[bool] = []
    with pytest.raises(TimeoutError):
        await in_block(0.05, pause)
    assert paused


@pytest.mark.parametrize(("first_s", "then_s"), [(3600, 0.05), (0.05, 0.1)])
async def test_another_time_applies_from_the_next_renewal_on(first_s: float, then_s: float) -> None:
    loop = asyncio.get_running_loop()
    renewed = loop.time()

    async def change(idle: IdleTimeout) -> None:
        idle.change(then_s)
        idle.renew()
        await asyncio.sleep(20)

    with pytest.raises(TimeoutError):
        await in_block(first_s, change)
    assert then_s <= loop.time() - renewed < 10


async def test_the_timeout_ends_with_the_block() -> None:
    async with IdleTimeout(0.02):
        pass
    await asyncio.sleep(0.06)


async def test_an_error_of_the_block_propagates() -> None:
    with pytest.raises(KeyError):
        async with IdleTimeout(1):
            raise KeyError


async def test_a_cancellation_is_not_a_timeout() -> None:
    task = asyncio.create_task(in_block(20, lambda _: asyncio.sleep(20)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_takes_precedence_over_the_timeout() -> None:
    async def wait(_: IdleTimeout) -> None:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.sleep(20)

    task = asyncio.create_task(in_block(0.01, wait))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_task_can_be_used_after_the_timeout() -> None:
    with pytest.raises(TimeoutError):
        await in_block(0.01, lambda _: asyncio.sleep(20))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)
