"""The idempotency keys of streams in Redis, for every process.

``start:<hash>`` is a hash: ``digest`` (of the body), ``owner`` (the process that starts the stream), ``stream`` (the
stream's id; empty until it is started). It expires with the stream.
"""

import asyncio
import hashlib
from typing import Any

from app.core.redis_pool import PREFIX, RedisClient
from app.streams.redis_client import keys_of, owner_key, redis_errors
from app.streams.store import LONGEST_START_S, StartedStream, StartKey, key_reused, start_in_progress

POLL_S = 0.1
CLAIM_MS = 10_000
"""Lifetime of a claim. Its process renews it until the stream is started; a claim of which no process knows expires."""
ANSWER_S = 2.0
"""Time limit for Redis."""

CLAIM = """
local digest, owner, stream = unpack(redis.call('HMGET', KEYS[1], 'digest', 'owner', 'stream'))
if digest and not (owner == ARGV[3] and stream == ARGV[4]) then return {digest, owner, stream} end
redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'owner', ARGV[2], 'stream', '')
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {}
"""
"""Arguments: digest, own name, then the owner and the stream of a dead claim to replace, lifetime.

Returns the claim that exists, or nothing if the claim was made.
"""

RELEASE = """
local owner, stream = unpack(redis.call('HMGET', KEYS[1], 'owner', 'stream'))
if owner == ARGV[1] and stream == '' then redis.call('DEL', KEYS[1]) end
"""


def start_key(start: StartKey) -> str:
    """The idempotency key is hashed, because it is a secret of the caller."""
    named = f"{len(start.caller)}:{start.caller}:{start.key}".encode()
    return f"{PREFIX}:start:{hashlib.sha256(named).hexdigest()}"


class RedisStarts:
    """``owner``: the name of this process."""

    def __init__(self, redis: RedisClient, owner: str) -> None:
        self._redis = redis
        self._owner = owner
        self._claims: set[str] = set()
        """The keys in Redis of the claims whose streams are not started yet."""

    async def claim(self, start: StartKey) -> StartedStream | None:
        """Returns the stream that was started with this key; None if the key belongs to this request now.

        Raises IdempotencyKeyReused, TooManyRequests or UpstreamUnavailable.
        """
        dead = ("", "")
        loop = asyncio.get_running_loop()
        ends = loop.time() + LONGEST_START_S
        while loop.time() < ends:
            digest, owner, stream = await self._claimed(start, dead)
            if not digest:
                self._claims.add(start_key(start))
                return None
            if digest != start.digest:
                raise key_reused()
            started = await self._started(stream)
            if started is not None:
                return started
            if stream or not await self._is_alive(owner):
                dead = owner, stream
            else:
                await asyncio.sleep(POLL_S)
        raise start_in_progress()

    async def release(self, start: StartKey) -> None:
        """Frees the key of a stream that was not started."""
        self.settle(start)
        with redis_errors():
            async with asyncio.timeout(ANSWER_S):
                await self._redis.eval(RELEASE, 1, start_key(start), self._owner)

    def settle(self, start: StartKey) -> None:
        """Called when the stream was started: its process renews the key with the stream."""
        self._claims.discard(start_key(start))

    async def renew(self, heartbeat: RedisClient) -> None:
        """Call this with each heartbeat. Raises redis-py's errors."""
        for key in list(self._claims):
            await heartbeat.pexpire(key, CLAIM_MS)

    async def _claimed(self, start: StartKey, dead: tuple[str, str]) -> tuple[str, str, str]:
        """Returns digest, owner and stream of the existing claim; empty strings if this process has the claim now.

        If the client disconnects in the meantime, a claim that Redis has made is released.
        """
        claiming = asyncio.create_task(self._claim(start, dead))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.wait([claiming])
            if claiming.exception() is None and not claiming.result()[0]:
                await self.release(start)
            raise

    async def _claim(self, start: StartKey, dead: tuple[str, str]) -> tuple[str, str, str]:
        words = (start.digest, self._owner, *dead, CLAIM_MS)
        with redis_errors():
            async with asyncio.timeout(ANSWER_S):
                found: list[Any] = await self._redis.eval(CLAIM, 1, start_key(start), *words)
        digest, owner, stream = (each.decode() for each in found) if found else ("", "", "")
        return digest, owner, stream

    async def _started(self, stream: str) -> StartedStream | None:
        """Returns None for a stream that was not started, or is not kept any more."""
        if not stream:
            return None
        with redis_errors():
            async with asyncio.timeout(ANSWER_S):
                found = await self._redis.hmget(keys_of(stream).stream, ["request_id", "evicted", "owner", "written"])
        request_id, evicted, owner, written = found
        has_failed = owner == b"" and written is None
        return None if request_id is None or evicted or has_failed else StartedStream(stream, request_id.decode())

    async def _is_alive(self, owner: str) -> bool:
        with redis_errors():
            async with asyncio.timeout(ANSWER_S):
                return bool(await self._redis.exists(owner_key(owner)))
