"""Large bodies are read one after the other, in turns of the callers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from app.admission.keys import ANYONE, Caller
from app.api.bodies import LONG_BYTES, BodyThread, off_loop
from app.core.errors import ClientClosedRequest, DeadlineExceeded
from app.core.inference import Deadline
from app.pipelines.body import LARGE_BYTES
from tests.toolkit.exchange import FakeConnection, exchange_with
from tests.toolkit.waiting import PATIENCE_S

A, B = Caller("a"), Caller("b")
Read = Callable[..., "asyncio.Task[None]"]


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
        self, name: str, caller: Caller, deadline: Deadline | None = None, *, is_long: bool = False
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


async def test_callers_take_turns(reads: Reads) -> None:
    tasks = [await reads.occupy()]
    tasks += [await reads.add(f"a{each}", A) for each in range(4)]
    tasks += [await reads.add(f"b{each}", B) for each in range(2)]
    reads.release()
    await asyncio.gather(*tasks)
    assert reads.names == ["a0", "b0", "a1", "b1", "a2", "a3"]


async def test_a_higher_priority_goes_first(reads: Reads) -> None:
    tasks = [await reads.occupy(), await reads.add("a", A), await reads.add("c", Caller("c", priority=1))]
    reads.release()
    await asyncio.gather(*tasks)
    assert reads.names == ["c", "a"]


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


@pytest.mark.parametrize("size", [LARGE_BYTES, LONG_BYTES])
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
