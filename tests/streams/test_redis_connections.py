"""The connections to a real Redis."""

import asyncio

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from app.streams.redis_client import Connections
from tests.toolkit.redis import RedisServer

STEPS = 60
"""More steps of the event loop than one command takes before it waits for Redis."""


async def test_a_command_can_be_cancelled_at_any_time(redis: RedisServer) -> None:
    connections = Connections(redis.url)
    await connections.tail.set("key", 1)
    for steps in range(STEPS):
        command = asyncio.create_task(connections.tail.get("key"))
        for _ in range(steps):
            await asyncio.sleep(0)
        is_accepted = command.cancel()
        await asyncio.wait([command])
        assert command.cancelled() is is_accepted, f"cancelled after {steps} steps"
        assert await connections.tail.get("key") == b"1"
    await connections.close()


def test_a_command_over_a_closed_connection_is_a_connection_error(redis: RedisServer) -> None:
    """With uvloop, which the gateway uses and whose closed connections raise RuntimeError."""

    async def run() -> None:
        connections = Connections(redis.url)
        connection = await connections.tail.connection_pool.get_connection()
        connection._writer.transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(RedisConnectionError):
            await connection.send_command("PING")
        await connections.tail.connection_pool.release(connection)
        assert await connections.tail.ping()
        await connections.close()

    uvloop.run(run())
