"""Starts of streams with a key, among processes with one Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from redis.asyncio import Redis

from app.api.idempotency import idempotency_layer
from app.api.idempotency.idempotency_layer import IdempotencyKeyReused, Repeatable, once_of_all
from app.core.errors import TooManyRequests, UpstreamUnavailable
from app.streams.redis_client import RedisNotes
from app.streams.redis_store import RedisStore
from app.streams.store import StartedStream
from app.streams.stream import Stream
from tests.toolkit.engine import FakeEngine
from tests.toolkit.redis import RedisServer
from tests.toolkit.streams import FINAL, FakeAnswer, plan_of, problem_of


class Process(RedisStore):
    """Starts streams with a key, and notes how often one was started."""

    runs = 0

    async def start(
        self, key: str, digest: str = "digest", caller: str = "key-of-a", gate: asyncio.Event | None = None
    ) -> str:
        async def run() -> StartedStream:
            self.runs += 1
            if gate is not None:
                await gate.wait()
            responses = FakeEngine(answers=[FINAL]).infer_stream(None, None)  # type: ignore[arg-type]
            stream = Stream(plan_of(responses, FakeAnswer()), self.new_log())
            stream_id = await self.keep(stream, 60.0, caller)
            stream.start()
            return StartedStream(stream_id, "rid", 60.0)

        assert self.notes is not None
        request = Repeatable(f"{caller}:{key}", caller, digest, 20.0, TooManyRequests("late"))
        return (await once_of_all(self.notes, self, request, run)).id


@asynccontextmanager
async def process(redis: RedisServer) -> AsyncIterator[Process]:
    async with Process(redis.url, problem_of) as store:
        work = asyncio.create_task(store.run())
        yield store
        work.cancel()
        await asyncio.wait([work])


async def test_every_process_finds_the_stream(redis: RedisServer) -> None:
    gate = asyncio.Event()
    async with process(redis) as here, process(redis) as there:
        first = asyncio.create_task(here.start("7e1f", gate=gate))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(there.start("7e1f"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        gate.set()
        stream_id = await first
        assert [await waiting, await here.start("7e1f")] == [stream_id, stream_id]
        with pytest.raises(IdempotencyKeyReused):
            await there.start("7e1f", "another")
        assert await there.start("7e1f", caller="key-of-b") != stream_id
        await there.delete(stream_id)
        assert await there.start("7e1f") != stream_id
        assert (here.runs, there.runs) == (1, 2)


async def test_a_failed_start_frees_the_key(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with process(redis) as here, process(redis) as there:
        monkeypatch.setattr(here, "keep", _unavailable)
        with pytest.raises(UpstreamUnavailable):
            await here.start("failed")
        await asyncio.wait_for(there.start("failed"), 2)
        assert there.runs == 1


async def test_a_stream_that_cannot_be_noted_is_deleted(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with process(redis) as here, Redis.from_url(redis.url) as client:
        before = {each async for each in client.scan_iter(_type="HASH")}
        monkeypatch.setattr(RedisNotes, "replace", _unavailable)
        with pytest.raises(UpstreamUnavailable):
            await here.start("not noted")
        assert here.runs == 1
        assert {each async for each in client.scan_iter(_type="HASH")} == before


async def _unavailable(*_: object) -> str:
    raise UpstreamUnavailable("The test says so.")


async def test_a_start_whose_client_disconnects_frees_the_key(redis: RedisServer) -> None:
    """The client may leave while Redis makes the claim: no step of that loses the key."""
    async with process(redis) as here, process(redis) as there:
        for turns in range(12):
            starting = asyncio.create_task(here.start(f"left-{turns}", gate=asyncio.Event()))
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            await asyncio.wait_for(there.start(f"left-{turns}"), 2)


async def test_a_start_whose_client_disconnects_while_it_runs_frees_the_key(redis: RedisServer) -> None:
    async with process(redis) as here, process(redis) as there:
        starting = asyncio.create_task(here.start("left", gate=asyncio.Event()))
        while not here.runs:
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait([starting])
        await asyncio.wait_for(there.start("left"), 2)


async def test_a_claim_lives_while_its_stream_waits(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_layer, "CLAIM_S", 0.4)
    async with process(redis) as here, process(redis) as there:
        first = asyncio.create_task(here.start("waiting", gate=asyncio.Event()))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(there.start("waiting"))
        await asyncio.sleep(1.2)
        assert not waiting.done()
        for task in (waiting, first):
            task.cancel()


async def test_the_claim_of_a_dead_process_expires(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_layer, "CLAIM_S", 0.5)
    async with process(redis) as here, process(redis) as there:
        first = asyncio.create_task(here.start("dead", gate=asyncio.Event()))
        await asyncio.sleep(0.1)
        with monkeypatch.context() as dead:
            dead.setattr(RedisNotes, "replace", _nothing)
            first.cancel()
            await asyncio.wait([first])
        await asyncio.wait_for(there.start("dead"), 5)
        assert there.runs == 1


async def _nothing(*_: object) -> None: ...


async def test_a_note_expires_and_does_not_contain_the_key(redis: RedisServer) -> None:
    async with process(redis) as here, Redis.from_url(redis.url) as client:
        await here.start("a secret of the caller")
        (note,) = [each for each in await client.keys("*:note:*") if await client.pttl(each) > 50_000][:1]
        assert 0 < await client.pttl(note) <= 60_000
        assert "secret" not in str(await client.keys("*"))
