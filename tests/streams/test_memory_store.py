"""Streams that outlive a connection: read by who holds the id, resumed, deleted, given up when nobody comes."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from app.domain.errors import InvalidRequest, UnknownStream
from app.streams.memory_store import MemoryStore
from app.streams.store import new_stream_id
from app.streams.stream import Stream
from tests.fakes.engine import Answer
from tests.fakes.streams import FINAL, Life, live, token

LONG_S = 20.0
SHORT_S = 0.05


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as kept:
        yield kept


async def kept(store: MemoryStore, *answers: Answer, resume_s: float = LONG_S) -> tuple[str, Life]:
    life = live(*answers, log=store.new_log())
    return await store.keep(life.stream, resume_s), life


async def gone(store: MemoryStore, stream_id: str) -> bool:
    try:
        await (await store.reader(stream_id)).close()
    except UnknownStream:
        return True
    return False


def code_of(stream: Stream) -> str | None:
    return stream.error.code if stream.error else None


async def test_a_stream_is_read_and_read_again(store: MemoryStore) -> None:
    stream_id, life = await kept(store, token(1), token(2), FINAL)
    await life.stream.ended()
    for _ in range(2):
        reader = await store.reader(stream_id)
        assert await reader.resume(0)
        assert [event.id for event in await reader.read(0)] == [1, 2, 3]
        await reader.close()


async def test_it_is_resumed_behind_what_was_seen(store: MemoryStore) -> None:
    stream_id, life = await kept(store, token(1), token(2), FINAL)
    await life.stream.ended()
    reader = await store.reader(stream_id)
    (event,) = [event for event in await reader.read(1) if event.id == 2]
    assert json.loads(event.data) == {"T": [2]}
    assert not await reader.resume(3)
    with pytest.raises(InvalidRequest):
        await reader.resume(4)
    await reader.close()


async def test_an_id_that_nobody_has(store: MemoryStore) -> None:
    with pytest.raises(UnknownStream):
        await store.reader("x")
    with pytest.raises(UnknownStream):
        await store.delete("x")


async def test_deleting_ends_and_forgets(store: MemoryStore) -> None:
    stream_id, life = await kept(store, token(1), 3600.0)
    await asyncio.sleep(0)
    await store.delete(stream_id)
    await life.stream.ended()
    assert code_of(life.stream) == "client_closed_request"
    assert await gone(store, stream_id)


async def test_a_stream_without_a_reader_is_given_up_and_forgotten(store: MemoryStore) -> None:
    stream_id, life = await kept(store, token(1), 3600.0, resume_s=SHORT_S)
    async with asyncio.timeout(LONG_S):
        await life.stream.ended()
        while not await gone(store, stream_id):
            await asyncio.sleep(SHORT_S * 3)
    assert code_of(life.stream) == "client_closed_request"


async def test_a_reader_keeps_it_alive_and_its_leaving_starts_the_wait(store: MemoryStore) -> None:
    stream_id, life = await kept(store, token(1), 3600.0, resume_s=SHORT_S)
    first, second = await store.reader(stream_id), await store.reader(stream_id)
    await asyncio.sleep(SHORT_S * 4)
    await first.close()
    await asyncio.sleep(SHORT_S * 4)
    assert life.stream.outcome is None
    await second.close()
    async with asyncio.timeout(LONG_S):
        await life.stream.ended()
    assert code_of(life.stream) == "client_closed_request"


async def test_a_reader_may_outlive_the_stream_it_deleted(store: MemoryStore) -> None:
    stream_id, life = await kept(store, token(1), FINAL)
    await life.stream.ended()
    reader = await store.reader(stream_id)
    await store.delete(stream_id)
    assert [event.name for event in await reader.read(0)] == ["output", "done"]
    await reader.close()


def test_ids_are_long_and_random() -> None:
    ids = {new_stream_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {22}
