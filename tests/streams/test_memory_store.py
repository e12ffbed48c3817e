"""The store in memory: access, expiry, the end of a stream without readers, and which stream is evicted at a limit."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.core.answer import Answer
from app.core.errors import StreamCancelled, StreamEvicted, TooManyRequests, UnknownStream
from app.core.inference import InferenceResponse
from app.streams import store as store_module
from app.streams.store import STREAM_BYTES, KeepLimits, KeepQuota, KeptStream, MemoryStore
from app.streams.stream import ReplayLog, Stream
from tests.toolkit.simulated_clock import on_a_simulated_clock
from tests.toolkit.streams import ids, opened, read_all, stream_of

RESUME_S = 0.1
LONG_S = 60.0


class Numbers(Answer):
    """An answer that numbers its responses."""

    seen = 0

    def add(self, response: InferenceResponse) -> dict[str, Any]:
        self.seen += 1
        return {"n": self.seen, "text": "x" * 100}


async def responses(count: int, *, then_wait: bool) -> AsyncGenerator[InferenceResponse]:
    for _ in range(count):
        yield InferenceResponse({}, is_final=False)
    if then_wait:
        await asyncio.Event().wait()


@asynccontextmanager
async def running() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as store:
        work = asyncio.create_task(store.run())
        yield store
        work.cancel()


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with running() as store:
        yield store


async def kept(
    store: MemoryStore, count: int = 3, *, runs_on: bool = False, resume_s: float = LONG_S, max_bytes: int = 10_000
) -> tuple[Stream, str]:
    stream = stream_of(responses(count, then_wait=runs_on), Numbers(), ReplayLog(max_bytes))
    stream_id = await store.keep(stream, resume_s)
    stream.start()
    return stream, stream_id


async def test_an_id_is_128_random_bits(store: MemoryStore) -> None:
    ids = {(await kept(store))[1] for _ in range(20)}
    assert len(ids) == 20
    assert {len(each) for each in ids} == {22}


@on_a_simulated_clock
async def test_an_unread_stream_is_ended_and_deleted_after_as_long_again() -> None:
    async with running() as store:
        stream, stream_id = await kept(store, runs_on=True, resume_s=10)
        await stream.ended()
        assert isinstance(stream.error, StreamCancelled)
        assert "No client read the stream" in stream.error.detail
        for _ in range(2):  # each reader begins the time again
            await asyncio.sleep(9)
            assert (await read_all(store, stream_id))[-1].name == "error"
        await asyncio.sleep(11)
        with pytest.raises(UnknownStream):
            await store.reader(stream_id)


async def test_a_stream_runs_until_its_last_reader_disconnects(store: MemoryStore) -> None:
    stream, stream_id = await kept(store, runs_on=True, resume_s=RESUME_S)
    first, second = await opened(store, stream_id), await opened(store, stream_id)
    await asyncio.sleep(2 * RESUME_S)
    await first.close()
    await asyncio.sleep(2 * RESUME_S)
    assert stream.outcome is None
    await second.close()
    await asyncio.wait_for(stream.ended(), 5)


async def test_deleting_ends_the_stream_with_an_error_event(store: MemoryStore) -> None:
    stream, stream_id = await kept(store, runs_on=True)
    reading = asyncio.create_task(read_all(store, stream_id))
    await asyncio.sleep(0)
    await store.delete(stream_id)
    events = await reading
    assert (events[-1].name, ids(events)) == ("error", list(range(1, len(events) + 1)))
    assert stream.error is not None
    assert stream.error.code == "cancelled"
    for call in (store.reader, store.delete):
        with pytest.raises(UnknownStream):
            await call(stream_id)


async def test_a_closed_store_ends_no_stream() -> None:
    async with running() as store:
        stream, stream_id = await kept(store, runs_on=True, resume_s=RESUME_S)
    await asyncio.sleep(2 * RESUME_S)
    assert stream.outcome is None
    with pytest.raises(UnknownStream):
        await store.reader(stream_id)
    stream.end(StreamCancelled("The test is over."))
    await stream.ended()


async def ended(store: MemoryStore, count: int = 3, caller: str = "") -> str:
    """Starts a stream, waits for its end, and returns its id."""
    stream = stream_of(responses(count, then_wait=False), Numbers(), store.new_log())
    stream_id = await store.keep(stream, LONG_S, caller)
    await asyncio.wait_for(stream.start(), 5)
    return stream_id


async def test_ended_streams_stay_within_the_limit_of_bytes() -> None:
    limits = KeepLimits(max_bytes=100_000)
    async with MemoryStore(limits) as store:
        stream_ids = [await ended(store, count=20) for _ in range(50)]
        assert store.usage.size <= limits.max_bytes
        assert 0 < store.usage.streams < 50
        assert len(await read_all(store, stream_ids[-1])) == 21
        with pytest.raises(StreamEvicted):
            await store.reader(stream_ids[0])


async def test_without_a_stream_to_evict_a_further_stream_is_rejected() -> None:
    async with MemoryStore(KeepLimits(max_streams=2)) as store:
        first = await ended(store)
        reader = await opened(store, first)
        await kept(store, runs_on=True)
        with pytest.raises(TooManyRequests) as caught:
            await ended(store)
        assert "GATEWAY_MAX_KEPT_STREAMS" in (caught.value.hint or "")
        await reader.close()
        await ended(store)


async def test_the_largest_running_streams_drop_their_oldest_events_at_the_limit() -> None:
    limits = KeepLimits(max_bytes=50_000)
    async with MemoryStore(limits) as store:
        running = [await kept(store, count=500, runs_on=True, max_bytes=1_000_000) for _ in range(4)]
        async with asyncio.timeout(5):
            while min(stream.outputs for stream, _ in running) < 500:
                await asyncio.sleep(0.01)
        assert store.usage.size <= limits.max_bytes
        for stream, stream_id in running:
            with pytest.raises(StreamEvicted):
                await store.reader(stream_id)
            reader = await opened(store, stream_id, stream.outputs - 10)
            assert len(await reader.read(stream.outputs - 10)) == 10


async def test_a_key_keeps_its_streams_while_another_key_starts_many() -> None:
    async with MemoryStore(KeepLimits(max_streams=10)) as store:
        mine = await ended(store, caller="mine")
        for _ in range(30):
            await ended(store, caller="other")
        assert len(await read_all(store, mine)) == 4
        assert store.usage.streams == 1 + 5


async def test_the_events_of_a_dropped_stream_are_freed_without_a_garbage_collection() -> None:
    """A full collection is rare, so until then much more than the limit would stay in memory."""
    gc.disable()
    try:
        async with MemoryStore(KeepLimits(max_streams=1)) as store:
            stream = stream_of(responses(3, then_wait=False), Numbers(), store.new_log())
            await store.keep(stream, LONG_S)
            await stream.start()
            log = weakref.ref(stream.log)
            del stream
            await ended(store)
            assert log() is None
    finally:
        gc.enable()


async def test_dropped_streams_report_the_memory_that_they_free() -> None:
    freed: list[int] = []
    async with MemoryStore(freed=freed.append) as store:
        for stream_id in [await ended(store) for _ in range(4)]:
            await store.delete(stream_id)
    assert len(freed) == 4
    assert min(freed) > STREAM_BYTES


async def test_usage_is_zero_after_every_stream_was_deleted_or_has_expired() -> None:
    async with running() as store:
        await store.delete(await ended(store))
        _, stream_id = await kept(store, runs_on=True)
        await store.delete(stream_id)
        await kept(store, resume_s=RESUME_S)
        await asyncio.sleep(3 * RESUME_S)
        assert (store.usage.streams, store.usage.size) == (0, 0)


async def test_the_oldest_evicted_ids_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_EVICTED", 1)
    async with MemoryStore(KeepLimits(max_streams=1)) as store:
        first, second, _ = [await ended(store) for _ in range(3)]
        with pytest.raises(UnknownStream):
            await store.reader(first)
        with pytest.raises(StreamEvicted):
            await store.reader(second)


KIB = 1024


def quota_of(max_kib: int = 1000, max_streams: int = 100) -> KeepQuota:
    return KeepQuota(KeepLimits(max_kib * KIB, max_streams))


def added(quota: KeepQuota, stream_id: str, caller: str = "", kib: int = 0, *, evictable: bool = True) -> KeptStream:
    kept = KeptStream(stream_id, caller)
    quota.add(kept)
    quota.grow(kept, kib * KIB)
    quota.mark(kept, evictable=evictable)
    return kept


def victim_of(quota: KeepQuota, caller: str = "") -> str:
    """The id of the stream that is evicted for a further one of this caller."""
    victim = quota.victim(caller, streams=1)
    assert quota.is_over(caller, streams=1)
    assert victim is not None
    return victim.id


def test_a_stream_of_the_caller_with_the_most_bytes_is_evicted() -> None:
    quota = quota_of(max_kib=105)
    added(quota, "small", "a", 1)
    added(quota, "large-1", "b", 30)
    added(quota, "large-2", "b", 10)
    added(quota, "runs", "c", 45, evictable=False)
    assert not quota.is_over("d"), "each of the four takes 4 KiB besides its events"
    assert victim_of(quota, "d") == "large-1"


def test_a_stream_that_is_read_again_becomes_the_newest() -> None:
    quota = quota_of(max_streams=2)
    first = added(quota, "1")
    added(quota, "2")
    assert victim_of(quota) == "1"
    for evictable in (False, True):
        quota.mark(first, evictable=evictable)
    assert victim_of(quota) == "2"


def test_the_refusal_of_a_key_names_its_share() -> None:
    quota = quota_of(max_streams=2)
    added(quota, "running", "a", evictable=False)
    assert "this API key" in quota.refusal("a").detail
