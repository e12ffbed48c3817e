"""Memory goes back to the system when no large request has ended for a while."""

import asyncio
import threading
from unittest.mock import patch

import pytest

from app.api import freed_memory
from app.api.budget import ByteBudget
from app.api.freed_memory import LARGE_BYTES, FreedMemory
from tests.fakes.exchange import exchange_with


class Releases:
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())


@pytest.fixture(autouse=True)
def _idle_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "IDLE_S", 0.05)


async def test_memory_is_released_once_after_the_last_large_request() -> None:
    releases = Releases()
    memory = FreedMemory(releases)
    for _ in range(3):
        memory.add(LARGE_BYTES)
        await asyncio.sleep(0.01)
    assert not releases.threads
    await asyncio.sleep(0.1)
    assert len(releases.threads) == 1
    assert releases.threads[0] is not threading.main_thread()


async def test_small_requests_release_nothing() -> None:
    releases = Releases()
    FreedMemory(releases).add(LARGE_BYTES - 1)
    await asyncio.sleep(0.1)
    assert not releases.threads


async def test_a_large_body_is_released_after_its_exchange() -> None:
    releases = Releases()
    with patch("app.api.freed_memory._release", releases):
        exchange = exchange_with(budget=ByteBudget(4 * LARGE_BYTES))
        exchange.hold(2 * LARGE_BYTES)
        await asyncio.sleep(0.1)
        assert not releases.threads
        exchange.close()
        await asyncio.sleep(0.1)
    assert len(releases.threads) == 1


def test_releasing_works_with_this_machines_c_library() -> None:
    freed_memory._release()
