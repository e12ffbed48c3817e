"""One request: its headers, its deadline, its memory, a client that disconnects, and the thread of large bodies."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from app.admission.keys import ANYONE, Key
from app.api import exchange as module
from app.api.bodies import LONG_BYTES, BodyThread, off_loop
from app.api.exchange import LARGE_BODY_BYTES, ByteBudget, Exchange, FreedMemory
from app.core.errors import ClientClosedRequest, DeadlineExceeded, InvalidInput, InvalidRequest
from app.core.inference import Deadline
from app.pipelines.body import LARGE_BYTES as THREAD_BYTES
from tests.toolkit.exchange import FakeConnection, exchange_with
from tests.toolkit.keys import key_with
from tests.toolkit.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("asked", "expected"),
    [([], 30), (["2.5"], 2.5), (["1e9"], 30), (["1", "2"], 1), (["1e-300"], pytest.approx(0.025, abs=0.025))],
    ids=str,
)
async def test_a_caller_can_shorten_the_deadline_of_the_pipeline(asked: list[str], expected: float) -> None:
    """With two headers of one name, the first one counts."""
    remaining = exchange_with([("x-request-timeout", each) for each in asked]).deadline(30).remaining_s()
    assert remaining == (pytest.approx(expected, abs=1) if isinstance(expected, int | float) else expected)


@pytest.mark.parametrize("asked", ["", "0", "-1", "nan", "inf", "-inf", "1e999", "soon", "1s", "1,5", "0x1"])
async def test_only_positive_numbers_are_accepted(asked: str) -> None:
    with pytest.raises(InvalidRequest):
        exchange_with([("x-request-timeout", asked)]).deadline(30)


async def work(connection: FakeConnection, seconds: float) -> str:
    tasks = asyncio.all_tasks()
    with exchange_with(connection=connection).cancelled_on_disconnect():
        assert asyncio.all_tasks() == tasks, "a task for each request would cost time"
        await asyncio.sleep(seconds)
    return "done"


async def test_a_disconnect_after_the_work_has_no_effect() -> None:
    connection = FakeConnection()
    assert await work(connection, 0.01) == "done"
    connection.lose()
    await asyncio.sleep(0)


@pytest.mark.parametrize("is_lost_before", [True, False])
async def test_a_disconnect_cancels_the_work_and_not_the_task(is_lost_before: bool) -> None:
    connection = FakeConnection()
    if is_lost_before:
        connection.lose()
    else:
        asyncio.get_running_loop().call_later(0.01, connection.lose)
    with pytest.raises(ClientClosedRequest):
        async with asyncio.timeout(20):
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
    with pytest.raises(ZeroDivisionError), exchange_with(connection=connection).cancelled_on_disconnect():
        raise ZeroDivisionError
    assert connection.on_lost is None


@pytest.fixture(autouse=True)
def releases(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that released freed memory, which happens soon."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    monkeypatch.setattr(module, "release_freed_memory", lambda: threads.append(threading.current_thread()))
    return threads


async def test_memory_is_released_once_after_the_last_large_request(releases: list[threading.Thread]) -> None:
    budget = ByteBudget(4 * LARGE_BODY_BYTES)
    exchange = exchange_with(budget=budget)
    exchange.hold(2 * LARGE_BODY_BYTES)
    await asyncio.sleep(0.1)
    assert not releases, "the request has not ended"
    exchange.close()
    for _ in range(3):
        budget.give_back(LARGE_BODY_BYTES)
        await asyncio.sleep(0.01)
    assert not releases
    await asyncio.sleep(0.1)
    assert len(releases) == 1
    assert releases[0] is not threading.main_thread()
    budget.give_back(LARGE_BODY_BYTES - 1)
    await asyncio.sleep(0.1)
    assert len(releases) == 1, "small requests release nothing"


async def test_bytes_that_are_released_before_the_end_are_given_back_once() -> None:
    budget = ByteBudget(100)
    exchange = exchange_with(budget=budget)
    exchange.hold(60)
    exchange.release(50)
    assert budget.taken == 10
    exchange.close()
    assert budget.taken == 0


async def test_the_memory_of_a_body_is_reused_for_the_next_body() -> None:
    budget = ByteBudget(4 * LARGE_BODY_BYTES)
    first = budget.mapping(LARGE_BODY_BYTES)
    budget.give_back(LARGE_BODY_BYTES, first)
    assert budget.mapping(2 * LARGE_BODY_BYTES) is not first
    assert budget.mapping(LARGE_BODY_BYTES) is not first, "memory that was too small is not kept"
    budget.give_back(LARGE_BODY_BYTES, first)
    assert budget.mapping(LARGE_BODY_BYTES - 1) is first, "a larger mapping is used for a pipeline with a smaller limit"
    assert budget.mapping(LARGE_BODY_BYTES) is not first


async def test_memory_with_references_is_not_reused() -> None:
    budget = ByteBudget(4 * LARGE_BODY_BYTES)
    body = budget.mapping(LARGE_BODY_BYTES)
    tensor = np.frombuffer(memoryview(body)[:8], np.uint8)
    budget.give_back(LARGE_BODY_BYTES, body)
    assert budget.mapping(LARGE_BODY_BYTES) is not body
    del tensor
    budget.give_back(LARGE_BODY_BYTES, body)
    assert budget.mapping(LARGE_BODY_BYTES) is body


@pytest.mark.parametrize("size", [LARGE_BODY_BYTES, LARGE_BODY_BYTES - 1])
async def test_the_memory_of_a_large_body_is_kept_until_the_gateway_is_idle(size: int) -> None:
    exchange = exchange_with(budget=ByteBudget(4 * LARGE_BODY_BYTES))
    exchange.hold(size)
    kept = weakref.ref(exchange.memory(LARGE_BODY_BYTES))
    exchange.close()
    assert (kept() is not None) is (size == LARGE_BODY_BYTES)
    await asyncio.sleep(0.1)
    assert kept() is None


async def test_memory_is_released_after_many_small_parts_of_it_were_freed() -> None:
    released: list[None] = []
    freed = FreedMemory(lambda: released.append(None))
    for size in (LARGE_BODY_BYTES // 2, 1):
        freed.add(size)
    await asyncio.sleep(0.1)
    assert not released
    for _ in range(2):
        freed.add(LARGE_BODY_BYTES // 2)
    await asyncio.sleep(0.1)
    assert len(released) == 1


async def test_the_body_of_a_rejected_request_is_freed_without_a_garbage_collection() -> None:
    budget = ByteBudget(4 * LARGE_BODY_BYTES)
    exchange = exchange_with(budget=budget)
    exchange.hold(LARGE_BODY_BYTES)
    freed = weakref.ref(exchange.memory(LARGE_BODY_BYTES))

    def rejected(exchange: Exchange, body: memoryview) -> None:
        assert len(body) == LARGE_BODY_BYTES
        exchange.record.fail(InvalidInput("The body is wrong."))
        assert exchange.record.error is not None
        raise exchange.record.error

    gc.disable()
    try:
        with suppress(InvalidInput):
            rejected(exchange, memoryview(freed() or b""))
        exchange.close()
        assert budget.mapping(LARGE_BODY_BYTES) is freed(), "the next body uses it"
    finally:
        gc.enable()


async def test_a_slow_answer_does_not_keep_its_body_in_memory() -> None:
    exchange = exchange_with(budget=ByteBudget(4 * LARGE_BODY_BYTES))
    body = exchange.memory(LARGE_BODY_BYTES)
    tensor, held = memoryview(body)[:8], weakref.ref(body)
    del body
    exchange.forget_request()
    assert held() is not None
    del tensor
    assert held() is None


_FAULTS = """
import resource, sys
from app.api.exchange import keep_freed_memory, release_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
    release_freed_memory()
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


A, B = key_with("a"), key_with("b")


class Reads:
    """A thread that is busy until :meth:`release`, and the names of the bodies that it has read since."""

    def __init__(self) -> None:
        self.thread = BodyThread()
        self.names: list[str] = []
        self._released = threading.Event()

    async def occupy(self) -> "asyncio.Task[None]":
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            assert self._released.wait(PATIENCE_S)

        first = asyncio.create_task(self.thread.read(wait, ANYONE, None, is_long=False))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        return first

    async def add(
        self, name: str, caller: Key, deadline: Deadline | None = None, *, is_long: bool = False
    ) -> "asyncio.Task[None]":
        read = partial(self.names.append, name)
        task = asyncio.create_task(self.thread.read(read, caller, deadline, is_long=is_long))
        await asyncio.sleep(0)  # it waits in the queue
        return task

    def release(self) -> None:
        self._released.set()


@pytest.fixture
async def reads() -> AsyncIterator[Reads]:
    made = Reads()
    yield made
    made.release()


async def test_callers_take_turns_behind_higher_priorities(reads: Reads) -> None:
    tasks = [await reads.occupy()]
    tasks += [await reads.add(f"a{each}", A) for each in range(4)]
    tasks += [await reads.add(f"b{each}", B) for each in range(2)]
    tasks.append(await reads.add("c", key_with("c", priority=1)))
    reads.release()
    await asyncio.gather(*tasks)
    assert reads.names == ["c", "a0", "b0", "a1", "b1", "a2", "a3"]


async def test_a_short_body_does_not_wait_for_all_long_ones(reads: Reads) -> None:
    tasks = [await reads.occupy()]
    tasks += [await reads.add(f"long{each}", ANYONE, is_long=True) for each in range(3)]
    tasks.append(await reads.add("short", ANYONE))
    reads.release()
    await asyncio.gather(*tasks)
    assert reads.names == ["long0", "short", "long1", "long2"]


async def test_a_wait_ends_at_the_deadline(reads: Reads) -> None:
    first = await reads.occupy()
    late = await reads.add("late", A, Deadline.after(0.01))
    with pytest.raises(DeadlineExceeded, match="before the body was read"):
        await late
    reads.release()
    await first
    await reads.add("next", A)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert reads.names == ["next"]


async def test_the_error_of_a_read_is_raised(reads: Reads) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await reads.thread.read(fail, A, None, is_long=False)
    assert await reads.thread.read(lambda: 1, A, None, is_long=False) == 1


@pytest.mark.parametrize("size", [THREAD_BYTES, LONG_BYTES])
async def test_a_body_whose_client_has_left_is_not_read(
    reads: Reads, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.bodies._thread", reads.thread)
    first = await reads.occupy()
    connection = FakeConnection()

    async def request() -> None:
        exchange = exchange_with(connection=connection)
        await off_loop(lambda _body: reads.names.append("left"), memoryview(bytes(size)), exchange)

    waiting = asyncio.create_task(request())
    await asyncio.sleep(0)
    connection.lose()
    with pytest.raises(ClientClosedRequest):
        await waiting
    reads.release()
    await first
    assert reads.names == []
