"""LazyTimer, the timer of a connection."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.http1.closing import LazyTimer


class Fired:
    def __init__(self, timer: LazyTimer) -> None:
        self.timer = timer
        self.names: list[str] = []

    def start(self, delay_s: float, name: str) -> None:
        self.timer.start(delay_s, lambda: self.names.append(name))


@pytest.fixture
async def fired() -> AsyncIterator[Fired]:
    timer = LazyTimer(asyncio.get_running_loop())
    yield Fired(timer)
    timer.close()


async def test_the_action_runs_once(fired: Fired) -> None:
    fired.start(0.01, "first")
    await asyncio.sleep(0.1)
    assert fired.names == ["first"]


async def test_a_later_start_replaces_the_action_and_the_time(fired: Fired) -> None:
    fired.start(0.01, "early")
    fired.start(0.2, "late")
    await asyncio.sleep(0.05)
    assert fired.names == []
    await asyncio.sleep(0.4)
    assert fired.names == ["late"]


async def test_an_earlier_start_does_not_wait_for_the_pending_call(fired: Fired) -> None:
    fired.start(3600, "late")
    fired.start(0.01, "early")
    await asyncio.sleep(0.1)
    assert fired.names == ["early"]


async def test_a_stopped_timer_does_not_fire_and_can_start_again(fired: Fired) -> None:
    fired.start(0.01, "stopped")
    fired.timer.stop()
    await asyncio.sleep(0.1)
    assert fired.names == []
    fired.start(0.01, "again")
    await asyncio.sleep(0.1)
    assert fired.names == ["again"]


async def test_an_action_may_start_the_timer(fired: Fired) -> None:
    fired.timer.start(0.01, lambda: fired.start(0.01, "second"))
    await asyncio.sleep(0.2)
    assert fired.names == ["second"]


async def test_a_closed_timer_never_fires(fired: Fired) -> None:
    fired.start(0.01, "closed")
    fired.timer.close()
    await asyncio.sleep(0.1)
    assert fired.names == []
