"""The store in a real Redis: many readers over few connections, slow readers, and failures."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from app.core.errors import (
    ClientClosedRequest,
    StreamEvicted,
    TooManyRequests,
    UnknownStream,
    UpstreamUnavailable,
)
from app.streams import redis_read, redis_store
from app.streams.redis_read import Keys, client_of
from app.streams.redis_store import PUBLISH_CONNECTIONS, REQUEST_CONNECTIONS, RedisStore
from app.streams.store import KEEP_LIMITS, KeepLimits
from app.streams.stream import Event, LiveLog, Stream
from tests.toolkit.engine import Answer, FakeEngine
from tests.toolkit.programs import RedisServer
from tests.toolkit.streams import FINAL, FakeAnswer, ids, opened, problem_of, read_all, stream_of, token

LONG_S = 60.0
CONNECTIONS = PUBLISH_CONNECTIONS + REQUEST_CONNECTIONS + 2


@asynccontextmanager
async def running(
    redis: RedisServer, store_type: type[RedisStore] = RedisStore, limits: KeepLimits = KEEP_LIMITS
) -> AsyncIterator[RedisStore]:
    async with store_type(redis.url, problem_of, limits) as store:
        work = asyncio.create_task(store.run())
        yield store
        work.cancel()
        await asyncio.wait([work])


async def kept(
    store: RedisStore, *answers: Answer, log: LiveLog | None = None, resume_s: float = LONG_S
) -> tuple[Stream, str]:
    engine = FakeEngine(answers=list(answers))
    responses = engine.infer_stream(None, None)  # type: ignore[arg-type]
    stream = stream_of(responses, FakeAnswer(), log or store.new_log())
    stream_id = await store.keep(stream, resume_s)
    stream.start()
    return stream, stream_id


@pytest.fixture
def quick_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_read, "ORPHAN_S", 0.1)
    monkeypatch.setattr(redis_read, "TOUCH_S", 0.1)


async def info(redis: RedisServer, section: str) -> dict[str, Any]:
    async with Redis.from_url(redis.url) as client:
        return dict(await client.info(section))


def steady(count: int, pause_s: float) -> list[Answer]:
    return [answer for number in range(count) for answer in (token(number), pause_s)] + [FINAL]


async def test_150_readers_of_20_streams_share_few_connections(redis: RedisServer) -> None:
    async with running(redis) as here, running(redis) as there:
        streams = [await kept(here, *steady(10, 0.05)) for _ in range(20)]
        readers = [asyncio.create_task(read_all(there, streams[n % 20][1])) for n in range(150)]
        await asyncio.sleep(0.2)
        connected = (await info(redis, "clients"))["connected_clients"]
        for events in await asyncio.gather(*readers):
            assert ids(events) == list(range(1, 12))
            assert events[-1].name == "done"
    assert connected <= 2 * CONNECTIONS + 1


async def test_a_slow_reader_gets_every_event(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_read, "MAX_KEPT_BYTES", 100)
    async with running(redis) as store:
        _, stream_id = await kept(store, *steady(100, 0.001))
        slow, quick = await asyncio.gather(read_all(store, stream_id, pause_s=0.01), read_all(store, stream_id))
    assert slow == quick
    assert ids(slow) == list(range(1, 102))


@pytest.mark.usefixtures("quick_orphans")
async def test_events_that_a_failover_lost_are_never_skipped(redis: RedisServer) -> None:
    """A replica that takes over may lack acknowledged events, which a reader has already sent to its client."""
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        _, stream_id = await kept(store, *map(token, range(10)), 1.0, token(10), 3600.0)
        reader = await opened(store, stream_id, read=10)
        assert await client.xdel(Keys(stream_id).events, *(f"{number}-1" for number in (7, 8, 9, 10))) == 4
        (end,) = await asyncio.wait_for(reader.read(10), 20)
        await reader.close()
        assert (end.id, end.name) == (11, "error")
        for after in (6, 7, 8, 9):
            with pytest.raises(StreamEvicted):
                await resumed(store, stream_id, after)
        assert ids(await resumed(store, stream_id, 10)) == [11]
        assert ids(await resumed(store, stream_id, 3)) == [4, 5, 6]
        assert ids(await resumed(store, stream_id, 0)) == [1, 2, 3, 4, 5, 6]


async def test_a_reader_does_not_wait_for_events_that_a_failover_lost(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reader in this process has received them, and they are not in memory any more."""
    monkeypatch.setattr(redis_read, "MAX_KEPT_BYTES", 1)
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        _, stream_id = await kept(store, *map(token, range(10)), 3600.0)
        reader = await opened(store, stream_id, read=10)
        await client.xdel(Keys(stream_id).events, *(f"{number}-1" for number in (7, 8, 9, 10)))
        assert ids(await asyncio.wait_for(resumed(store, stream_id, 3), 10)) == [4, 5, 6]
        await reader.close()


@pytest.mark.usefixtures("quick_orphans")
async def test_a_stream_whose_terminal_event_was_lost_in_a_failover_ends(redis: RedisServer) -> None:
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        stream, stream_id = await kept(store, token(1), token(2), FINAL)
        assert ids(await read_all(store, stream_id)) == [1, 2, 3]
        await asyncio.sleep(1)
        await client.execute_command("CLIENT", "PAUSE", 1500)
        await client.xdel(Keys(stream_id).events, "3-1")
        await client.execute_command("XSETID", Keys(stream_id).events, "2-1")
        events = await asyncio.wait_for(read_all(store, stream_id), 20)
        assert [(event.id, event.name) for event in events] == [(1, "output"), (2, "output"), (3, "error")]
        assert stream.error is None


@pytest.mark.parametrize("answers", [(FINAL,), (3600.0,)], ids=["ended", "running"])
async def test_a_stream_whose_events_redis_has_evicted_cannot_be_read(
    redis: RedisServer, answers: tuple[Answer, ...]
) -> None:
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        _, stream_id = await kept(store, token(1), token(2), *answers)
        async with asyncio.timeout(5):
            while await client.xlen(Keys(stream_id).events) < 2 + answers.count(FINAL):
                await asyncio.sleep(0.01)
        await client.delete(Keys(stream_id).events)
        for _ in range(2):
            with pytest.raises(StreamEvicted):
                await store.reader(stream_id)


@pytest.mark.usefixtures("quick_orphans")
async def test_readers_of_a_stream_whose_events_redis_evicts_do_not_wait(redis: RedisServer) -> None:
    async with running(redis) as store, running(redis) as other, Redis.from_url(redis.url) as client:
        stream, stream_id = await kept(store, *map(token, range(3)), 3600.0)
        reader = await opened(store, stream_id, read=3)
        await client.delete(Keys(stream_id).events)
        (end,) = await asyncio.wait_for(reader.read(3), 10)
        assert (end.id, end.name) == (4, "error")
        await asyncio.wait_for(stream.ended(), 5)
        with pytest.raises(StreamEvicted):
            await resumed(other, stream_id, 0)
        assert ids(await resumed(other, stream_id, 3)) == [4]
        await reader.close()


@pytest.mark.usefixtures("quick_orphans")
async def test_a_reader_beyond_the_terminal_event_of_another_reader_does_not_wait(redis: RedisServer) -> None:
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        _, stream_id = await kept(store, *map(token, range(3)), 3600.0)
        reader = await opened(store, stream_id, read=3)
        keys = Keys(stream_id)
        pipe = client.pipeline(transaction=True).delete(keys.events).hset(keys.stream, "owner", "")
        await pipe.xadd(keys.events, {"name": "error", "data": b"{}"}, id="2-1").execute()
        with pytest.raises(UpstreamUnavailable):
            await asyncio.wait_for(reader.read(3), 10)
        await reader.close()


async def resumed(store: RedisStore, stream_id: str, after: int) -> list[Event]:
    """Returns the events until the terminal event, or until a lost event ends the connection."""
    reader = await opened(store, stream_id, after)
    events: list[Event] = []
    try:
        while not (events and events[-1].is_terminal):
            events += await reader.read(events[-1].id if events else after)
    except StreamEvicted:
        if not events:
            raise
    finally:
        await reader.close()
    return events


async def test_an_outage_of_redis_is_no_missing_heartbeat_of_the_owner(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_read, "TOUCH_S", 0.1)
    monkeypatch.setattr(redis_read, "ORPHAN_S", 1.5)
    async with RedisStore(redis.url, problem_of) as without_heartbeat, running(redis) as there:
        _, stream_id = await kept(without_heartbeat, token(0), LONG_S)
        reader = await opened(there, stream_id, read=1)
        await asyncio.sleep(0.5)
        redis.stop()
        await asyncio.sleep(1.5)
        redis.start()
        answers_at = asyncio.get_running_loop().time()
        (end,) = await asyncio.wait_for(reader.read(1), 10)
        assert end.name == "error"
        assert asyncio.get_running_loop().time() - answers_at > 1.2
        await reader.close()


async def test_an_idle_process_sends_redis_only_heartbeats(redis: RedisServer) -> None:
    async with running(redis) as store:
        _, stream_id = await kept(store, token(1), FINAL)
        await read_all(store, stream_id)
        await asyncio.sleep(0.6)
        assert (await info(redis, "clients"))["blocked_clients"] == 0


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("events", {"name": b"output"}),
        ("events", {"name": b"\xff", "data": b"{}"}),
        ("stream", {"resume_ms": b"soon"}),
        ("stream", {"owner": b"\xff"}),
    ],
)
async def test_a_malformed_entry_ends_the_stream_for_its_readers(
    redis: RedisServer, key: str, fields: dict[str, bytes]
) -> None:
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        _, stream_id = await kept(store, token(1), FINAL)
        await read_all(store, stream_id)
        keys = Keys(stream_id)
        if key == "events":
            await client.delete(keys.events)
            await client.xadd(keys.events, fields, id="1-1")
        else:
            await client.hset(keys.stream, mapping=fields)
        with pytest.raises(StreamEvicted):
            await store.reader(stream_id)


class BrokenLog(LiveLog):
    async def read(self, after: int) -> list[Event]:
        raise RuntimeError("a bug")


@pytest.mark.usefixtures("quick_orphans")
async def test_a_failed_publisher_ends_its_stream_and_is_logged(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(redis) as store:
        stream, stream_id = await kept(store, token(1), 3600.0, log=BrokenLog())
        await asyncio.wait_for(stream.ended(), 5)
        assert stream.error is not None
        assert stream.error.code == "internal"
        events = await asyncio.wait_for(read_all(store, stream_id), 10)
    assert [event.name for event in events] == ["error"]
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert line.exc_info is not None
    assert "a bug" in str(line.exc_info[1])


class BrokenHeartbeat(RedisStore):
    async def _look_at(self, batch: object) -> None:
        raise RuntimeError("a bug")


async def test_run_raises_unexpected_exceptions_of_the_heartbeat(redis: RedisServer) -> None:
    async with BrokenHeartbeat(redis.url, problem_of) as store:
        work = asyncio.create_task(store.run())
        stream, _ = await kept(store, token(1), FINAL, 3600.0)
        with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="a bug")):
            await asyncio.wait_for(work, 5)
        stream.end(ClientClosedRequest("The test is over."))


async def test_an_unreadable_entry_ends_only_its_own_stream(redis: RedisServer) -> None:
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        stream, broken = await kept(store, token(1), 3600.0)
        _, valid = await kept(store, token(1), 0.6, token(2), FINAL)
        reading = [asyncio.create_task(read_all(store, each)) for each in (broken, valid)]
        await asyncio.sleep(0.3)
        await client.xadd(f"triton-gateway:{broken}:events", {"foreign": "1"}, id="9-1")
        errors, events = await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), 10)
        assert isinstance(errors, Exception)
        assert isinstance(events, list)
        assert events[-1].name == "done"
        stream.end(ClientClosedRequest("The test is over."))


async def test_a_store_that_closes_writes_the_last_events_of_ended_streams(redis: RedisServer) -> None:
    async with running(redis) as other, Redis.from_url(redis.url) as client:
        async with running(redis) as store:
            stream, stream_id = await kept(store, 0.1, token(1), 0.1, FINAL)
            await client.execute_command("CLIENT", "PAUSE", 500)
            await stream.ended()
        assert [event.name for event in await read_all(other, stream_id)] == ["output", "done"]


async def test_an_unknown_stream_is_404_and_leaves_no_key(redis: RedisServer) -> None:
    async with running(redis) as store, Redis.from_url(redis.url) as client:
        with pytest.raises(UnknownStream):
            await store.reader("AAAAAAAAAAAAAAAAAAAAAA")
        assert not await client.keys("*AAAA*")


async def test_every_process_knows_the_key_that_started_a_stream(redis: RedisServer) -> None:
    async with running(redis) as owner, running(redis) as other:
        for caller in ("team-a", ""):
            stream = stream_of(FakeEngine().infer_stream(None, None), FakeAnswer(), owner.new_log())  # type: ignore[arg-type]
            stream_id = await owner.keep(stream, LONG_S, caller)
            stream.start()
            assert await other.caller_of(stream_id) == caller
        with pytest.raises(UnknownStream):
            await other.caller_of("unknown")


async def ended(store: RedisStore, count: int = 3, resume_s: float = LONG_S) -> str:
    """Starts a stream, waits until its terminal event is in Redis, and returns its id."""
    _, stream_id = await kept(store, *(token(number) for number in range(count)), FINAL, resume_s=resume_s)
    await read_all(store, stream_id)
    return stream_id


async def without_readers(redis: RedisServer, *stream_ids: str) -> None:
    """Removes the readers' keys, which otherwise expire after three seconds."""
    async with Redis.from_url(redis.url) as client:
        await client.delete(*(f"triton-gateway:{stream_id}:readers" for stream_id in stream_ids))


async def test_ended_streams_in_redis_stay_within_the_limits(redis: RedisServer) -> None:
    limits = KeepLimits(max_bytes=100_000, max_streams=8)
    async with running(redis, limits=limits) as here, running(redis) as there:
        stream_ids = []
        for _ in range(12):
            stream_ids.append(await ended(here))
            await without_readers(redis, *stream_ids)
        assert here.usage.streams == 8
        assert here.usage.size <= limits.max_bytes
        assert ids(await read_all(there, stream_ids[-1])) == [1, 2, 3, 4]
        with pytest.raises(StreamEvicted):
            await there.reader(stream_ids[0])
        with pytest.raises(StreamEvicted):
            await there.delete(stream_ids[0])
        async with Redis.from_url(redis.url) as client:
            assert await client.exists(*(f"triton-gateway:{stream_id}:events" for stream_id in stream_ids)) == 8


async def test_many_streams_at_once_never_exceed_the_limits_in_redis(redis: RedisServer) -> None:
    limits, seen = KeepLimits(max_bytes=100_000, max_streams=12), []
    async with running(redis, limits=limits) as store:

        async def start_some() -> None:
            for _ in range(10):
                _, stream_id = await kept(store, *(token(number) for number in range(20)), FINAL)
                while store._streams[stream_id].stream is not None:
                    seen.append((store.usage.size, store.usage.streams))
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as clients:
            for _ in range(8):
                clients.create_task(start_some())
    assert max(size for size, _ in seen) <= limits.max_bytes
    assert max(streams for _, streams in seen) <= limits.max_streams


async def test_an_ended_stream_in_redis_that_is_being_read_is_not_evicted(redis: RedisServer) -> None:
    async with running(redis, limits=KeepLimits(max_streams=1)) as here, running(redis) as there:
        stream_id = await ended(here)
        async with Redis.from_url(redis.url) as client:
            await client.set(f"triton-gateway:{stream_id}:readers", 1, px=3000)
        with pytest.raises(TooManyRequests):
            await ended(here)
        assert ids(await read_all(there, stream_id)) == [1, 2, 3, 4]


async def test_the_usage_of_expired_and_deleted_streams_in_redis_ends(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "LEASE_MS", 0)
    monkeypatch.setattr(redis_store, "PRESENCE_MS", 100)
    async with running(redis) as here:
        stream_ids = [await ended(here, resume_s=0.5) for _ in range(2)]
        await here.delete(stream_ids[1])
        async with Redis.from_url(redis.url) as client:
            for stream_id in stream_ids:
                await client.pexpire(f"triton-gateway:{stream_id}:events", 500)
        await without_readers(redis, *stream_ids)
        assert here.usage.streams == 2
        async with asyncio.timeout(10):
            while here.usage.streams:
                await asyncio.sleep(0.1)
        assert here.usage.size == 0


async def test_a_heartbeat_after_an_outage_needs_few_round_trips(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up the streams that ended shortly before. Meanwhile no stream starts, and the next heartbeat waits."""
    monkeypatch.setattr(redis_store, "OUTAGE_NOTICED_S", 0.0)
    async with running(redis) as store:
        for _ in range(100):
            stream, _ = await kept(store, FINAL)
            await stream.ended()
        await asyncio.sleep(0.6)
        before = (await info(redis, "stats"))["total_reads_processed"]
        await asyncio.sleep(2 * redis_store.HEARTBEAT_S)
        assert (await info(redis, "stats"))["total_reads_processed"] - before < 50


STEPS = 60
"""More steps of the event loop than one command takes before it waits for Redis."""


async def test_a_command_can_be_cancelled_at_any_time(redis: RedisServer) -> None:
    client = client_of(redis.url, 1)
    await client.set("key", 1)
    for steps in range(STEPS):
        command = asyncio.create_task(client.get("key"))
        for _ in range(steps):
            await asyncio.sleep(0)
        is_accepted = command.cancel()
        await asyncio.wait([command])
        assert command.cancelled() is is_accepted, f"cancelled after {steps} steps"
        assert await client.get("key") == b"1"
    await client.aclose()


def test_a_command_over_a_closed_connection_is_a_connection_error(redis: RedisServer) -> None:
    """With uvloop, which the gateway uses and whose closed connections raise RuntimeError."""

    async def run() -> None:
        client = client_of(redis.url, 1)
        connection = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(RedisConnectionError):
            await connection.send_command("PING")
        await client.connection_pool.release(connection)
        assert await client.ping()
        await client.aclose()

    uvloop.run(run())
