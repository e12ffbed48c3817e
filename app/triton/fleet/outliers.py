"""Watches the Tritons of a balancer and ejects those that are down or much slower than the others."""

import asyncio
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress

from app.core.aio import BackgroundTasks, Backoff
from app.core.errors import GatewayError
from app.triton.fleet.balancer import Balancer
from app.triton.fleet.server import TritonServer
from app.triton.health.canaries import Canaries, canary_of, is_answered

POLL_S = 0.25
SHORTEST_S = 0.05
SILENCE_S = 1.0
"""After this time without an answer to its running calls, a server gets a liveness check."""
ENOUGH = 16
"""The number of latencies of a model that is needed to compare two servers."""
TIMES = 5.0
"""A server is slow if its median latency of a model is this many times that of the others,"""
LEAST_S = 0.05
"""and at least this much longer."""
FIRST_RETURN_S = 10.0
LONGEST_RETURN_S = 120.0
"""Longest time until a slow server is probed. The time doubles with each unsuccessful probe."""
_log = logging.getLogger(__name__)


class Watch:
    def __init__(self, balancer: Balancer, canaries: Canaries) -> None:
        self._balancer = balancer
        self._canaries = canaries
        self._looking: set[TritonServer] = set()
        self._tasks = BackgroundTasks()
        self._slow: dict[TritonServer, Slow] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            is_suspected = await self._is_suspected_within(POLL_S)
            for server in self._balancer.servers:
                if is_suspected or not server.is_up or _is_silent(server):
                    self._start(server)
            self._eject_slow()
            for server, slow in list(self._slow.items()):
                if slow.backoff.is_due:
                    slow.backoff.fail()
                    self._tasks.start(self._probe(server, slow))

    async def _is_suspected_within(self, wait_s: float) -> bool:
        suspected = self._balancer.suspected
        await asyncio.sleep(SHORTEST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s - SHORTEST_S):
                await suspected.wait()
        is_set = suspected.is_set()
        suspected.clear()
        return is_set

    def _start(self, server: TritonServer) -> None:
        if server not in self._looking:
            self._looking.add(server)
            self._tasks.start(self._look_at(server))

    async def _look_at(self, server: TritonServer) -> None:
        try:
            await self._balancer.look_at(server)
        finally:
            self._looking.discard(server)

    def _eject_slow(self) -> None:
        """Ejects slow servers, but never more than half of all servers."""
        usable = [server for server in self._balancer.servers if server.is_usable]
        for server, model, limit_s in slow_servers(usable):
            if 2 * (sum(each.is_usable for each in usable) - 1) < len(self._balancer.servers):
                return
            self._slow[server] = Slow(model, limit_s)
            self._balancer.eject_slow(server)

    async def _probe(self, server: TritonServer, slow: "Slow") -> None:
        if server not in self._balancer.servers:
            self._slow.pop(server, None)
        elif await self._is_fast(server, slow):
            self._slow.pop(server, None)
            server.is_slow = False
            server.start_slowly()
            self._balancer.tell()
            _log.info("Triton at %s is used again", server.address)

    async def _is_fast(self, server: TritonServer, slow: "Slow") -> bool:
        """Whether the server answers a canary in time. Without a canary, an up server counts as fast."""
        canary = canary_of(self._canaries, slow.model)
        if canary is None:
            return server.is_up
        began = time.monotonic()
        try:
            is_fast = await is_answered(server.engine, canary, 2 * slow.limit_s)
        except GatewayError:
            return False
        return is_fast and time.monotonic() - began < slow.limit_s


class Slow:
    """Why a server was ejected, and when to probe it. ``limit_s``: a longer latency of the model is too slow."""

    def __init__(self, model: str, limit_s: float) -> None:
        self.model = model
        self.limit_s = limit_s
        self.backoff = Backoff(FIRST_RETURN_S, LONGEST_RETURN_S)
        self.backoff.fail()


def slow_servers(servers: list[TritonServer]) -> Iterator[tuple[TritonServer, str, float]]:
    """Yields each server that answers a model much slower than the others, with the model and the limit in seconds."""
    for model in {model for server in servers for model in server.latencies}:
        medians = {
            server: statistics.median(server.latencies[model])
            for server in servers
            if len(server.latencies[model]) >= ENOUGH
        }
        for server, median_s in medians.items():
            others_s = [each for other, each in medians.items() if other is not server]
            if others_s:
                limit_s = max(TIMES * statistics.median(others_s), statistics.median(others_s) + LEAST_S)
                if median_s > limit_s:
                    yield server, model, limit_s


def _is_silent(server: TritonServer) -> bool:
    return server.in_flight > 0 and not server.health.is_heard_since(time.monotonic() - SILENCE_S)
