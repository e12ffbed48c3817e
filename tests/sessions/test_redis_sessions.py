"""The count of sessions that several gateways share, in a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.core.errors import GatewayError, TooManyRequests, UpstreamUnavailable
from app.core.sequence import SequenceIds
from app.core.session import SessionTerms, StatefulModel
from app.sessions import redis_sessions
from app.sessions.home import SessionHome
from app.sessions.redis_sessions import RedisSessions
from tests.live.redis import RedisServer

TWO = SessionTerms((StatefulModel("m", 2, 60.0),), SequenceIds(), 30.0, 600.0)


def gateway(redis: RedisServer, name: str, host: str = "pod-a", triton: str = "triton:8001") -> RedisSessions:
    return RedisSessions(redis.url, SessionHome(name), triton=triton, host=host, address=f"{host}:8080")


@asynccontextmanager
async def running(shared: RedisSessions) -> AsyncIterator[RedisSessions]:
    async with shared:
        task = asyncio.create_task(shared.run())
        try:
            yield shared
        finally:
            task.cancel()
            await asyncio.wait([task])


async def take_after(error: type[GatewayError], shared: RedisSessions, terms: SessionTerms) -> None:
    """Takes a place as soon as the gateway no longer answers with ``error``."""
    async with asyncio.timeout(10):
        while True:
            try:
                await shared.take("", terms, 1)
                return
            except error:
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def empty(redis: RedisServer) -> None:
    redis.flush()


async def test_all_gateways_share_the_places_of_a_triton(redis: RedisServer) -> None:
    async with gateway(redis, "a") as first, gateway(redis, "b", "pod-b") as second:
        lease = await first.take("", TWO, 1)
        await second.take("", TWO, 1)
        for each in (first, second):
            with pytest.raises(TooManyRequests):
                await each.take("", TWO, 1)
            await each.take("other:8001", TWO, 1)
        first.release(lease)
        await first.take("", TWO, 1)


async def test_each_of_several_tritons_has_its_part(redis: RedisServer) -> None:
    async with gateway(redis, "a") as first:
        for address in ("10.0.0.1:8001", "10.0.0.2:8001"):
            await first.take(address, TWO, 2)
            with pytest.raises(TooManyRequests):
                await first.take(address, TWO, 2)


@pytest.mark.parametrize("triton", ["127.0.0.1:8001", "localhost:8001", "[::1]:8001", "unix:/triton"])
async def test_a_triton_of_each_pod_is_not_shared(redis: RedisServer, triton: str) -> None:
    async with (
        gateway(redis, "a", "pod-a", triton) as first,
        gateway(redis, "b", "pod-a", triton) as beside,
        gateway(redis, "c", "pod-b", triton) as other,
    ):
        await first.take("", TWO, 1)
        await beside.take("", TWO, 1)
        with pytest.raises(TooManyRequests):
            await first.take("", TWO, 1)
        await other.take("", TWO, 1)


async def test_the_leases_of_a_gateway_that_ended_expire(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_sessions, "GRACE_S", 0.0)
    brief = SessionTerms((StatefulModel("m", 1, 0.3),), SequenceIds(), 30.0, 600.0)
    async with gateway(redis, "a") as ended, gateway(redis, "b") as other:
        await ended.take("", brief, 1)
        with pytest.raises(TooManyRequests):
            await other.take("", brief, 1)
        await asyncio.sleep(0.4)
        await other.take("", brief, 1)


async def test_a_running_gateway_keeps_its_leases(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if Redis loses its data."""
    monkeypatch.setattr(redis_sessions, "GRACE_S", 0.0)
    monkeypatch.setattr(redis_sessions, "RENEW_S", 0.05)
    brief = SessionTerms((StatefulModel("m", 1, 0.8),), SequenceIds(), 30.0, 600.0)
    async with running(gateway(redis, "a")) as first, gateway(redis, "b") as other:
        lease = await first.take("", brief, 1)
        redis.flush()
        await asyncio.sleep(1.0)
        with pytest.raises(TooManyRequests):
            await other.take("", brief, 1)
        assert await other.address_of("a") == "pod-a:8080"
        assert await other.address_of("b") is None
        first.release(lease)
        await take_after(TooManyRequests, other, brief)


async def test_without_redis_no_session_is_opened_and_the_others_go_on(redis: RedisServer) -> None:
    async with running(gateway(redis, "a")) as shared:
        lease = await shared.take("", TWO, 1)
        redis.stop()
        try:
            for _ in range(2):
                with pytest.raises(UpstreamUnavailable):
                    await shared.take("", TWO, 1)
            assert await shared.address_of("a") is None
            shared.release(lease)
        finally:
            redis.start()
        await take_after(UpstreamUnavailable, shared, TWO)
        await shared.take("", TWO, 1)
