"""What the gateways with one Redis know of each other's sessions: how many each Triton has, and where a gateway runs.

``places:<model>@<Triton>`` is a sorted set: the lease of each session of any gateway, by the time when it expires in
milliseconds. The gateway of the session renews it. ``gateway:<name>`` is the address of a gateway that has sessions.
"""

import asyncio
import secrets
from asyncio import timeout
from contextlib import suppress
from time import monotonic
from typing import Self

from redis.exceptions import RedisError

from app.core.errors import UpstreamUnavailable
from app.core.loopback import is_loopback
from app.core.redis_pool import PREFIX, batches, redis_client, redis_errors_as
from app.core.session import SessionTerms
from app.sessions.home import SessionHome
from app.sessions.places import PlaceLease, no_free_place

CONNECTIONS = 4
ANSWER_S = 2.0
"""Time limit for Redis."""
RENEW_S = 2.0
RETRY_PAUSE_S = 0.25
GRACE_S = 10.0
"""How long after Triton has forgotten a sequence the lease of a gateway that ended expires."""
GATEWAY_MS = 60_000
"""How long the address of a gateway is known without a renewal."""
UNAVAILABLE = "The shared count of sessions is not available; send the request again."

_NOW = "local time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n"
_ADD = """
local function add(key, lease, lease_ms)
  redis.call('ZADD', key, now + lease_ms, lease)
  if redis.call('PTTL', key) < tonumber(lease_ms) then redis.call('PEXPIRE', key, lease_ms) end
end
"""
TAKE = f"""{_NOW}{_ADD}
for i, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  if redis.call('ZCARD', key) >= tonumber(ARGV[i + 2]) then return 0 end
end
for _, key in ipairs(KEYS) do add(key, ARGV[1], ARGV[2]) end
return 1
"""
"""Keys: of the places. Arguments: lease, its milliseconds, and the limit of each key. Returns 0 if one is full."""
RENEW = f"""{_NOW}{_ADD}
for i, key in ipairs(KEYS) do add(key, ARGV[2 * i - 1], ARGV[2 * i]) end
"""
"""Arguments: lease and milliseconds for each key. A lease that Redis has lost is there again."""


class RedisSessions:
    """Implements :class:`app.sessions.places.SharedPlaces`.

    ``triton``: the address of a single Triton. ``host``: the machine or pod; a Triton at a loopback address or a Unix
    socket is another one on each host. ``address``: of this gateway, for the answers of others.
    """

    def __init__(self, url: str, home: SessionHome, *, triton: str, host: str, address: str) -> None:
        self._redis = redis_client(url, CONNECTIONS)
        self._home = home
        self._triton = triton
        self._host = host
        self._address = address
        self._leases: set[PlaceLease] = set()
        self._released: set[PlaceLease] = set()
        """Those that Redis may still have."""
        self._is_away = False
        self._renew_at = 0.0
        self._has_work = asyncio.Event()

    async def take(self, home: str, terms: SessionTerms, servers: int) -> PlaceLease:
        if self._is_away:
            raise UpstreamUnavailable(UNAVAILABLE)
        limits = {self._key_of(model.name, home): model.slots // servers for model in terms.models}
        lease = PlaceLease(secrets.token_urlsafe(16), tuple(limits), int((terms.longest_idle_s + GRACE_S) * 1000))
        try:
            with redis_errors_as(UNAVAILABLE):
                async with timeout(ANSWER_S):
                    await self._remove_released()
                    words = lease.id, lease.lifetime_ms, *limits.values()
                    is_taken = await self._redis.eval(TAKE, len(limits), *limits, *words)
        except BaseException as exc:
            self._is_away |= isinstance(exc, UpstreamUnavailable)
            self.release(lease)  # Redis may have it
            raise
        if not is_taken:
            raise no_free_place()
        self._leases.add(lease)
        self._has_work.set()
        return lease

    def release(self, lease: PlaceLease) -> None:
        self._leases.discard(lease)
        self._released.add(lease)
        self._has_work.set()

    async def address_of(self, gateway: str) -> str | None:
        try:
            async with timeout(ANSWER_S):
                found = await self._redis.get(_gateway_key(gateway))
        except (RedisError, OSError):
            return None
        return None if found is None else found.decode(errors="replace")

    async def run(self) -> None:
        """Renews the leases until it is cancelled. Calls Redis only while this process has leases."""
        while True:
            await self._pause()
            self._has_work.clear()
            try:
                async with timeout(ANSWER_S):
                    await self._remove_released()
                    await self._renew()
                self._is_away = False
            except (RedisError, OSError):
                self._is_away = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The leases of sequences that Triton still has expire by themselves."""
        with suppress(RedisError, OSError):
            async with timeout(ANSWER_S):
                await self._remove_released()
        await self._redis.aclose()

    async def _pause(self) -> None:
        """Waits until there is something to do for :meth:`run`."""
        if self._is_away:
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        with suppress(TimeoutError):
            async with timeout(RENEW_S if self._leases else None):
                await self._has_work.wait()

    async def _renew(self) -> None:
        if not self._leases or monotonic() < self._renew_at:
            return
        await self._redis.set(_gateway_key(self._home.gateway), self._address, px=GATEWAY_MS)
        for batch in batches(list(self._leases)):
            keys = [key for lease in batch for key in lease.keys]
            words = [word for lease in batch for _ in lease.keys for word in (lease.id, lease.lifetime_ms)]
            await self._redis.eval(RENEW, len(keys), *keys, *words)
        self._renew_at = monotonic() + RENEW_S / 2

    async def _remove_released(self) -> None:
        for batch in batches(list(self._released)):
            async with self._redis.pipeline(transaction=False) as pipe:
                for lease in batch:
                    for key in lease.keys:
                        pipe.zrem(key, lease.id)
                await pipe.execute()
            self._released.difference_update(batch)

    def _key_of(self, model: str, home: str) -> str:
        address = home or self._triton
        is_of_host = address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))
        return f"{PREFIX}:places:{model}@{f'{self._host}/' * is_of_host}{address}"


def _gateway_key(gateway: str) -> str:
    return f"{PREFIX}:gateway:{gateway}"
