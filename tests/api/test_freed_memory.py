"""Memory is returned to the system when no large request has arrived for ``IDLE_S``."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest

from app.api import body_memory
from app.api.body_memory import LARGE_BYTES, ByteBudget, FreedMemory
from app.api.exchange import Exchange
from app.core.errors import InvalidInput
from tests.toolkit.exchange import exchange_with


class Releases:
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())


@pytest.fixture(autouse=True)
def _short_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "IDLE_S", 0.05)


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
    with patch("app.api.body_memory.release", releases):
        exchange = exchange_with(budget=ByteBudget(4 * LARGE_BYTES))
        exchange.hold(2 * LARGE_BYTES)
        await asyncio.sleep(0.1)
        assert not releases.threads
        exchange.close()
        await asyncio.sleep(0.1)
    assert len(releases.threads) == 1


async def test_the_memory_of_a_body_is_reused_for_the_next_body() -> None:
    budget = ByteBudget(4 * LARGE_BYTES)
    first = budget.mapping(LARGE_BYTES)
    budget.give_back(LARGE_BYTES, first)
    assert budget.mapping(2 * LARGE_BYTES) is not first
    assert budget.mapping(LARGE_BYTES) is not first, "memory that was too small is not kept"
    budget.give_back(LARGE_BYTES, first)
    assert budget.mapping(LARGE_BYTES - 1) is first, "a larger mapping is used for a pipeline with a smaller limit"
    assert budget.mapping(LARGE_BYTES) is not first


async def test_memory_with_references_is_not_reused() -> None:
    budget = ByteBudget(4 * LARGE_BYTES)
    body = budget.mapping(LARGE_BYTES)
    tensor = np.frombuffer(memoryview(body)[:8], np.uint8)
    budget.give_back(LARGE_BYTES, body)
    assert budget.mapping(LARGE_BYTES) is not body
    del tensor
    budget.give_back(LARGE_BYTES, body)
    assert budget.mapping(LARGE_BYTES) is body


async def test_kept_memory_is_released_when_idle() -> None:
    with patch("app.api.body_memory.release"):
        budget = ByteBudget(4 * LARGE_BYTES)
        exchange = exchange_with(budget=budget)
        exchange.hold(LARGE_BYTES)
        kept = weakref.ref(exchange.memory(LARGE_BYTES))
        exchange.close()
        assert kept() is not None
        await asyncio.sleep(0.1)
    assert kept() is None


async def test_the_memory_of_a_small_body_is_not_kept() -> None:
    exchange = exchange_with(budget=ByteBudget(4 * LARGE_BYTES))
    exchange.hold(LARGE_BYTES - 1)
    freed = weakref.ref(exchange.memory(LARGE_BYTES))
    exchange.close()
    assert freed() is None


async def test_the_body_of_a_rejected_request_is_freed_without_a_garbage_collection() -> None:
    budget = ByteBudget(4 * LARGE_BYTES)
    exchange = exchange_with(budget=budget)
    exchange.hold(LARGE_BYTES)
    freed = weakref.ref(exchange.memory(LARGE_BYTES))

    def rejected(exchange: Exchange, body: memoryview) -> None:
        assert len(body) == LARGE_BYTES
        exchange.record.fail(InvalidInput("The body is wrong."))
        assert exchange.record.error is not None
        raise exchange.record.error

    gc.disable()
    try:
        with suppress(InvalidInput):
            rejected(exchange, memoryview(freed() or b""))
        exchange.close()
        assert budget.mapping(LARGE_BYTES) is freed(), "the next body uses it"
    finally:
        gc.enable()


async def test_forget_body_frees_the_memory_at_once() -> None:
    exchange = exchange_with(budget=ByteBudget(4 * LARGE_BYTES))
    exchange.hold(LARGE_BYTES)
    freed = weakref.ref(exchange.memory(LARGE_BYTES))
    exchange.forget_body()
    assert freed() is None
    exchange.close()


async def test_a_slow_answer_does_not_keep_its_body_in_memory() -> None:
    exchange = exchange_with(budget=ByteBudget(4 * LARGE_BYTES))
    body = exchange.memory(LARGE_BYTES)
    tensor, held = memoryview(body)[:8], weakref.ref(body)
    del body
    exchange.forget_request()
    assert held() is not None
    del tensor
    assert held() is None


def test_release_works_with_the_c_library() -> None:
    body_memory.release()


_FAULTS = """
import resource, sys
from app.api import body_memory
if sys.argv[1] == "kept":
    body_memory.keep()
def request():
    return len([b"x" * 1_500_000 for _ in range(4)])
for _ in range(3):
    request()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    request()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_kept_memory_needs_no_new_pages() -> None:
    """Four blocks of 1.5 MB have 1,465 pages."""

    def new_pages(kind: str) -> int:
        command = [sys.executable, "-c", _FAULTS, kind]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert new_pages("kept") < 1_000
    assert new_pages("by default") > 10_000
