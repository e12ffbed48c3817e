"""Watches the Tritons behind a balancer: which are down, which answer much slower than the others."""

import asyncio
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress

from app.domain.background import BackgroundTasks
from app.domain.backoff import Backoff
from app.domain.deadline import Deadline
from app.domain.errors import GatewayError
from app.triton.balancer import Balancer
from app.triton.canaries import Canaries, answer
from app.triton.server import Server

POLL_S = 0.25
SHORTEST_S = 0.05
SILENCE_S = 1.0
"""A server that answered no call for so long, while calls are under way, is asked whether it is live."""
ENOUGH = 16
"""So many latencies of a model are needed to compare two servers."""
TIMES = 5.0
"""A server is slow if its median latency of a model is so many times that of the others,"""
LEAST_S = 0.05
"""and longer by so much."""
FIRST_RETURN_S = 10.0
LONGEST_RETURN_S = 120.0
"""The time until a slow server is probed. It doubles while the server stays slow."""
_log = logging.getLogger(__name__)


class Watch:
    def __init__(self, balancer: Balancer, canaries: Canaries) -> None:
        self._balancer = balancer
        self._canaries = canaries
        self._looking: set[Server] = set()
        self._tasks = BackgroundTasks()
        self._slow: dict[Server, Slow] = {}

    async def run(self) -> None:
        """Runs until it is cancelled."""
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

    def _start(self, server: Server) -> None:
        if server not in self._looking:
            self._looking.add(server)
            self._tasks.start(self._look_at(server))

    async def _look_at(self, server: Server) -> None:
        try:
            await self._balancer.look_at(server)
        finally:
            self._looking.discard(server)

    def _eject_slow(self) -> None:
        """At least half of the servers stay."""
        usable = [server for server in self._balancer.servers if server.is_usable]
        for server, model, limit_s in slow_servers(usable):
            if 2 * (sum(each.is_usable for each in usable) - 1) < len(self._balancer.servers):
                return
            self._slow[server] = Slow(model, limit_s)
            self._balancer.eject_slow(server)

    async def _probe(self, server: Server, slow: "Slow") -> None:
        if server not in self._balancer.servers:
            self._slow.pop(server, None)
        elif await self._is_fast(server, slow):
            self._slow.pop(server, None)
            server.is_slow = False
            server.start_slowly()
            self._balancer.tell()
            _log.info("Triton at %s is used again", server.address)

    async def _is_fast(self, server: Server, slow: "Slow") -> bool:
        """Without a sample, the server gets another chance."""
        canary = next((each for each in self._canaries.all() if each.request.model == slow.model), None)
        if canary is None:
            return server.is_up
        began = time.monotonic()
        try:
            await answer(server.engine, canary, Deadline.after(2 * slow.limit_s))
        except GatewayError:
            return False
        return time.monotonic() - began < slow.limit_s


class Slow:
    """Why a server was ejected. ``limit_s``: the latency of the model that was too long."""

    def __init__(self, model: str, limit_s: float) -> None:
        self.model = model
        self.limit_s = limit_s
        self.backoff = Backoff(FIRST_RETURN_S, LONGEST_RETURN_S)
        self.backoff.fail()


def slow_servers(servers: list[Server]) -> Iterator[tuple[Server, str, float]]:
    """Servers that answer a model much slower than the others: the server, the model, the limit in seconds."""
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


def _is_silent(server: Server) -> bool:
    return server.in_flight > 0 and time.monotonic() - server.health.progress.heard_at > SILENCE_S
