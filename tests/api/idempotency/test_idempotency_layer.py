"""``Idempotency-Key``: repeated requests get the first answer, and the model runs once, also with several processes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from redis.asyncio import Redis

from app.api.idempotency import idempotency_layer
from app.api.idempotency.idempotency_layer import IdempotencyKeyReused, Repeatable, Repeats, once_of_all
from app.core.errors import DeadlineExceeded, TooManyRequests, UpstreamUnavailable
from app.streams.redis_store import RedisStore
from app.streams.store import STREAM_BYTES, KeepLimits, StartedStream
from tests.api.conftest import CONFIG, FINAL, PNG, READ, counted, scripted_fixture, word
from tests.toolkit.engine import FakeEngine
from tests.toolkit.gateway import Served
from tests.toolkit.programs import RedisServer
from tests.toolkit.streams import FakeAnswer, problem_of, stream_of
from tests.toolkit.waiting import until

KEY = {"Idempotency-Key": "7e1f3c0a-77e9-4a4c-9a7f-0d1f2a3b4c5d"}
START = {"pipeline": "write", "inputs": {"prompt": "x", "seed": 3}}
OUTPUTS = [word(b"a", 1), word(b"b", 2), FINAL]


api = scripted_fixture(CONFIG.replace("model: reader", "model: reader\n    idempotent: true"))
"""The pipeline ``read`` is idempotent."""


def start(api: Served, body: Any = START, **headers: str) -> Any:
    return api.client.post("/v1/streams", json=body, headers=KEY | headers)


def read(api: Served, note: str = "n", **headers: str) -> Any:
    files = {"image": ("a.png", PNG, "image/png")}
    return api.client.post("/v1/pipelines/read", files=files, data={"note": note}, headers=KEY | headers)


async def idle(api: Served) -> None:
    await asyncio.wait_for(api.gateway.inference.workload.idle(), 20)


class TestStreams:
    async def test_repeated_starts_return_the_same_stream(self, api: Served) -> None:
        api.engine.answers = OUTPUTS
        running = await asyncio.gather(*(start(api) for _ in range(8)))
        await idle(api)
        answers = [*running, await start(api)]
        assert [answer.status_code for answer in answers] == [201] * 9
        assert all(answer.json() == answers[0].json() for answer in answers)
        assert {answer.headers["location"] for answer in answers} == {answers[0].json()["url"]}
        assert len(api.engine.requests) == 1
        assert (counted(api, "write", "stream"), counted(api, "-", "stream")) == ({"ok": 1}, {})

    async def test_another_body_is_422_and_the_key_is_free_after_a_failure_and_after_delete(self, api: Served) -> None:
        assert (await start(api, START | {"inputs": {"prompt": 1}})).status_code == 422
        api.engine.answers = OUTPUTS
        first = await start(api)
        answer = await start(api, START | {"inputs": {"prompt": "y"}})
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
        another_key = await start(api, **{"Idempotency-Key": "other"})
        await api.client.delete(first.json()["url"])
        second = await start(api)
        assert len({each.json()["id"] for each in (first, another_key, second)}) == 3

    async def test_a_repeated_start_needs_no_room(self, api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        api.engine.answers = OUTPUTS
        first = await start(api)
        refuse = Mock(side_effect=TooManyRequests("There is no slot."))
        monkeypatch.setattr(type(api.gateway.inference), "check_load_of_any", refuse)
        assert (await start(api, **{"Idempotency-Key": "other"})).status_code == 429
        assert (await start(api)).json() == first.json()

    @pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "ä"])
    async def test_an_unusable_key_is_400(self, api: Served, key: str) -> None:
        headers = {"Idempotency-Key": key.encode("latin-1")}
        answer = await api.client.post("/v1/streams", json=START, headers=headers)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


class TestUnaryRequests:
    async def test_repeated_requests_get_the_same_answer(self, api: Served) -> None:
        """The boundary of a repeated form is another one."""
        api.engine.answers = [0.05, READ]
        running: list[httpx.Response] = await asyncio.gather(*(read(api) for _ in range(4)))
        answers = [*running, await read(api)]
        assert len({answer.request.headers["content-type"] for answer in answers}) == 5
        assert {(answer.status_code, answer.content) for answer in answers} == {(200, answers[0].content)}
        assert len(api.engine.requests) == 1
        assert counted(api, "read", "unary") == {"ok": 5}

    async def test_a_repeated_request_waits_until_its_own_deadline(self, api: Served) -> None:
        api.engine.answers = [1.0, READ]
        first = asyncio.create_task(read(api))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        second = await read(api, **{"X-Request-Timeout": "0.1"})
        assert (second.status_code, second.json()["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - started < 0.8
        assert (await first).status_code == 200
        assert len(api.engine.requests) == 1

    async def test_another_body_is_422_and_an_error_is_not_kept(self, api: Served) -> None:
        api.engine.answers = [TooManyRequests("full")]
        assert (await read(api)).status_code == 429
        api.engine.answers = [READ]
        assert (await read(api)).status_code == 200
        answer = await read(api, "another note")
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")

    async def test_a_pipeline_that_is_not_idempotent_runs_again(self, api: Served) -> None:
        api.engine.answers = OUTPUTS
        for _ in range(2):
            answer = await api.client.post("/v1/pipelines/write", json=START["inputs"], headers=KEY)
            assert answer.status_code == 200
        assert len(api.engine.requests) == 2


class TestKeptAnswers:
    async def keep(self, answers: Repeats, key: str, caller: str = "", digest: str = "d", keep_s: float = 60.0) -> bool:
        """Returns whether the model ran."""
        runs = 0

        async def run() -> str:
            nonlocal runs
            runs += 1
            return "answer"

        request = Repeatable(f"{caller}:{key}", caller, digest, 20.0, DeadlineExceeded("late"))
        await answers.once(request, run, lambda _: (STREAM_BYTES, keep_s))
        return runs == 1

    async def test_the_oldest_answers_of_a_caller_are_dropped_first(self) -> None:
        answers = Repeats(KeepLimits(max_bytes=8 * STREAM_BYTES, max_streams=100))
        await self.keep(answers, "a", "quiet")
        assert [await self.keep(answers, key, "loud") for key in "abcdef"] == [True] * 6
        assert not await self.keep(answers, "f", "loud")
        assert await self.keep(answers, "a", "loud")
        assert not await self.keep(answers, "a", "quiet")

    async def test_answers_expire(self) -> None:
        answers = Repeats(KeepLimits(100 * STREAM_BYTES, 100))
        await self.keep(answers, "a", keep_s=0.02)
        with pytest.raises(IdempotencyKeyReused):
            await self.keep(answers, "a", digest="another")
        await asyncio.sleep(0.1)
        assert await self.keep(answers, "a", digest="another")


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
            stream = stream_of(responses, FakeAnswer(), self.new_log())
            stream_id = await self.keep(stream, 60.0, caller)
            stream.start()
            return StartedStream(stream_id, "rid", 60.0)

        request = Repeatable(f"{caller}:{key}", caller, digest, 20.0, TooManyRequests("late"))
        return (await once_of_all(self, request, run)).id


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
        await until(lambda: here.runs)
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
        monkeypatch.setattr(here, "keep", AsyncMock(side_effect=UpstreamUnavailable("The test says so.")))
        with pytest.raises(UpstreamUnavailable):
            await here.start("failed")
        await asyncio.wait_for(there.start("failed"), 2)
        assert there.runs == 1


async def test_a_stream_that_cannot_be_noted_is_deleted(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with process(redis) as here, Redis.from_url(redis.url) as client:
        before = {each async for each in client.scan_iter(_type="HASH")}
        monkeypatch.setattr(here, "replace_note", AsyncMock(side_effect=UpstreamUnavailable("The test says so.")))
        with pytest.raises(UpstreamUnavailable):
            await here.start("not noted")
        assert here.runs == 1
        assert {each async for each in client.scan_iter(_type="HASH")} == before


async def test_a_start_whose_client_disconnects_frees_the_key(redis: RedisServer) -> None:
    """The client may leave while Redis makes the claim: no step of that loses the key."""
    async with process(redis) as here, process(redis) as there:
        for turns in (*range(12), None):  # None: while the start runs
            before = here.runs
            starting = asyncio.create_task(here.start(f"left-{turns}", gate=asyncio.Event()))
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            while turns is None and here.runs == before:
                await asyncio.sleep(0.01)
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            await asyncio.wait_for(there.start(f"left-{turns}"), 2)


async def test_a_claim_lives_while_its_stream_waits(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_layer, "CLAIM_S", 0.4)
    async with process(redis) as here, process(redis) as there:
        first = asyncio.create_task(here.start("waiting", gate=asyncio.Event()))
        await until(lambda: here.runs)
        waiting = asyncio.create_task(there.start("waiting"))
        await asyncio.sleep(1.2)
        assert not waiting.done()
        for task in (waiting, first):
            task.cancel()


async def test_the_claim_of_a_dead_process_expires(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_layer, "CLAIM_S", 0.5)
    async with process(redis) as here, process(redis) as there:
        first = asyncio.create_task(here.start("dead", gate=asyncio.Event()))
        await until(lambda: here.runs)
        with monkeypatch.context() as dead:
            dead.setattr(here, "replace_note", AsyncMock())
            first.cancel()
            await asyncio.wait([first])
        await asyncio.wait_for(there.start("dead"), 5)
        assert there.runs == 1


async def test_a_note_expires_and_does_not_contain_the_key(redis: RedisServer) -> None:
    async with process(redis) as here, Redis.from_url(redis.url) as client:
        await here.start("a secret of the caller")
        (note,) = [each for each in await client.keys("*:note:*") if await client.pttl(each) > 50_000][:1]
        assert 0 < await client.pttl(note) <= 60_000
        assert "secret" not in str(await client.keys("*"))
