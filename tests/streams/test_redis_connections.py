"""The connections to a real Redis."""

import asyncio

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
