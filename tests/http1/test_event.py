"""LazyEvent, which allocates nothing until a task waits for it."""

import asyncio

import pytest

from app.http1.closing import LazyEvent


async def test_a_set_event_does_not_wait() -> None:
    event = LazyEvent(is_set=True)
    assert await event.wait()
    event.clear()
    waiting = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    assert await waiting


async def test_a_cancelled_waiter_does_not_affect_the_others() -> None:
    event = LazyEvent(is_set=False)
    first, *others = [asyncio.create_task(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    event.set()
    event.clear()
    assert await asyncio.gather(*others) == [True, True]


async def test_an_event_can_be_set_again() -> None:
    event = LazyEvent(is_set=False)
    for _ in range(2):
        waiting = asyncio.create_task(event.wait())
        await asyncio.sleep(0)
        event.set()
        assert await waiting
        event.clear()
