"""Watches the Tritons of a balancer and ejects those that are down or much slower than the others."""

import asyncio
import logging
import statistics
import time
from contextlib import suppress
from math import inf

from app.core.aio import BackgroundTasks, Backoff
from app.core.errors import GatewayError
from app.triton.fleet.balancer import Balancer
from app.triton.fleet.member import Slow, TritonServer
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


async def watch_servers(balancer: Balancer, canaries: Canaries) -> None:
    """Runs until cancelled. One check of a server at a time."""
    checked = set[TritonServer]()

    async def check(server: TritonServer, *, is_suspect: bool) -> None:
        try:
            if is_suspect:
                await balancer.look_at(server)
            if server.slow is not None and server.slow.probes.is_due and await is_fast(server, server.slow):
                server.slow = None
                server.start_slowly()
                balancer.tell()
                _log.info("Triton at %s is used again", server.address)
        finally:
            checked.discard(server)

    async def is_fast(server: TritonServer, slow: Slow) -> bool:
        """Whether it answers a canary in time. Without a canary, an up server counts as fast."""
        slow.probes.fail()
        canary, began = canary_of(canaries, slow.model), time.monotonic()
        if canary is None:
            return server.is_up
        try:
            return (
                await is_answered(server.engine, canary, 2 * slow.limit_s) and time.monotonic() - began < slow.limit_s
            )
        except GatewayError:
            return False

    tasks = BackgroundTasks()
    while True:
        await asyncio.sleep(SHORTEST_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(balancer.suspected.wait(), POLL_S - SHORTEST_S)
        is_suspected = balancer.suspected.is_set()
        balancer.suspected.clear()
        for server in balancer.servers:
            is_heard = server.health.is_heard_since(time.monotonic() - SILENCE_S)
            is_suspect = is_suspected or not server.is_up or (server.in_flight > 0 and not is_heard)
            if (is_suspect or server.slow is not None) and server not in checked:
                checked.add(server)
                tasks.start(check(server, is_suspect=is_suspect))
        eject_slow(balancer)


def eject_slow(balancer: Balancer) -> None:
    """Ejects servers that answer a model much slower than the others, but never more than half of all servers."""
    usable = [server for server in balancer.servers if server.is_usable]
    for model in {model for server in usable for model in server.latencies}:
        latencies = {server: server.latencies[model] for server in usable}
        medians = {server: statistics.median(found) for server, found in latencies.items() if len(found) >= ENOUGH}
        for server, median_s in medians.items():
            others_s = [each for other, each in medians.items() if other is not server]
            limit_s = (
                max(TIMES * statistics.median(others_s), statistics.median(others_s) + LEAST_S) if others_s else inf
            )
            if median_s <= limit_s or not server.is_usable:
                continue
            if 2 * (sum(each.is_usable for each in usable) - 1) < len(balancer.servers):
                return
            server.slow = Slow(model, limit_s, Backoff(FIRST_RETURN_S, LONGEST_RETURN_S))
            server.slow.probes.fail()
            balancer.eject(server)
