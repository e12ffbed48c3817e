"""Which Tritons a balancer has, as their addresses change, and which of them it uses: those neither down nor slow."""

import asyncio
import logging
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress

from app.core.aio import BackgroundTasks, Backoff
from app.core.engine import InferenceServer
from app.core.errors import UpstreamUnavailable
from app.triton.connect import addresses_of, host_and_port, open_transport, wrong_address
from app.triton.credentials import Credentials
from app.triton.fleet.balancer import Balancer, TritonServer
from app.triton.health.health_watch import Canaries, is_answered
from app.triton.triton_engine import TritonEngine

OpenServer = Callable[[str], AbstractAsyncContextManager[TritonServer]]
RESOLVE_S = 5.0
"""Interval at which a DNS name is resolved, and the timeout of one attempt."""


async def resolve(host: str, port: int) -> list[str]:
    """Returns the IPv4 addresses, or the IPv6 addresses if there are none. Raises OSError.

    It never returns both, because a machine with addresses of both families runs only one Triton.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {family: [str(info[4][0]) for info in found if info[0] == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, [])


class ServerPool:
    """``names``: fixed addresses, or one DNS name, whose addresses are followed."""

    def __init__(self, names: tuple[str, ...], balancer: Balancer, open_server: OpenServer, canaries: Canaries) -> None:
        self._names = names
        self._balancer = balancer
        self._open_server = open_server
        self._canaries = canaries
        self._stacks: dict[TritonServer, AsyncExitStack] = {}
        self._is_resolving = len(names) == 1
        self._has_failed = False

    async def open(self) -> None:
        """Adds the first servers. They share the requests equally from the start, without a slow start."""
        await self.follow()
        for server in self._balancer.servers:
            server.joined_at = 0.0

    async def run(self) -> None:
        """Ejects servers that are down or slow, and follows the DNS name, until cancelled.

        One check of a server at a time. A server that has left is closed when it is idle.
        """
        balancer, follow_at, tasks = self._balancer, time.monotonic() + RESOLVE_S, BackgroundTasks()
        try:
            while True:
                await asyncio.sleep(SHORTEST_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(balancer.suspected.wait(), POLL_S - SHORTEST_S)
                is_suspected = balancer.suspected.is_set()
                balancer.suspected.clear()
                for server in list(balancer.servers):
                    is_heard = server.health.is_heard_since(time.monotonic() - SILENCE_S)
                    if server.is_leaving and not server.in_flight:
                        tasks.start(self._remove(server), server)
                    elif is_suspected or not server.is_up or (server.in_flight > 0 and not is_heard):
                        tasks.start(balancer.look_at(server), server)
                for server, model, limit_s in slow_servers(balancer):
                    server.is_slow = True
                    balancer.tell(server)
                    tasks.start(self._return(server, model, limit_s))
                if self._is_resolving and time.monotonic() >= follow_at:
                    tasks.start(self.follow(), "addresses")
                    follow_at = time.monotonic() + RESOLVE_S
        finally:
            await tasks.close(within_s=0)

    async def _return(self, server: TritonServer, model: str, limit_s: float) -> None:
        """Uses a slow server again when it answers a canary of the model in time."""
        probes = Backoff(FIRST_RETURN_S, LONGEST_RETURN_S)
        while server in self._balancer.servers:
            await asyncio.sleep(probes.fail())
            canary, began = self._canaries().get(model), time.monotonic()
            is_fast = server.is_up if canary is None else await is_answered(server.engine, canary, 2 * limit_s)
            if is_fast and time.monotonic() - began < limit_s:
                server.is_slow = False
                server.start_slowly()
                self._balancer.tell()
                _log.info("Triton at %s is used again", server.address)
                return

    async def follow(self) -> None:
        """Adds new addresses. Removed addresses get no further requests."""
        wanted = frozenset(self._names)
        if self._is_resolving:
            try:
                host, port = host_and_port(self._names[0])
                async with asyncio.timeout(RESOLVE_S):
                    hosts = await resolve(host, port)
                wanted = frozenset(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts)
            except OSError as exc:
                if not self._has_failed:
                    _log.error("%s cannot be resolved: %s; the known addresses stay", self._names[0], exc or "timeout")
                self._has_failed = True
                return
            self._has_failed = False
        known = {server.address: server for server in self._balancer.servers}
        for address, server in known.items():
            if server.is_leaving != (address not in wanted):
                server.is_leaving = not server.is_leaving
                _log.info("Triton at %s %s", address, "leaves" if server.is_leaving else "returns")
        for address in sorted(wanted - known.keys()):
            stack = AsyncExitStack()
            server = await stack.enter_async_context(self._open_server(address))
            server.is_up = False  # until its models have been queried
            self._stacks[server] = stack
            self._balancer.servers.append(server)
            _log.info("Triton at %s joins", address)
        await self._balancer.is_live()
        self._balancer.tell()

    async def close(self) -> None:
        for server in list(self._stacks):
            await self._remove(server)

    async def _remove(self, server: TritonServer) -> None:
        if server in self._balancer.servers:
            self._balancer.servers.remove(server)
            self._balancer.tell()
        await self._stacks.pop(server).aclose()


@asynccontextmanager
async def open_engine(url: str, credentials: Credentials) -> AsyncIterator[InferenceServer]:
    """Opens an engine for a command. ``url``: see ``GATEWAY_TRITON_URL``.

    If there are several addresses, their models are compared. Raises UpstreamUnavailable with
    the address, ValueError or CredentialsUnusable.
    """
    balancer = Balancer()
    async with AsyncExitStack() as stack:
        for address in addresses_of(url):
            transport = await stack.enter_async_context(open_transport(address, credentials=credentials))
            balancer.servers.append(TritonServer(address, TritonEngine(transport)))
        try:
            yield balancer.servers[0].engine if len(balancer.servers) == 1 else balancer
        except UpstreamUnavailable as exc:
            faults = [
                f"Triton at {each}: {fault}." for each in addresses_of(url) if (fault := await wrong_address(each))
            ]
            text = f"Nothing answers at {url} (gRPC). Is it Triton's gRPC port, usually 8001?"
            raise UpstreamUnavailable(" ".join(faults) or text) from exc


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


def slow_servers(balancer: Balancer) -> Iterator[tuple[TritonServer, str, float]]:
    """Yields servers to eject, each with the model that it answers much slower than the others, and its time limit.

    Never more than half of all servers are ejected.
    """
    usable = [server for server in balancer.servers if server.is_usable]
    for model in {model for server in usable for model in server.latencies}:
        medians = {each: statistics.median(found) for each in usable if len(found := each.latencies[model]) >= ENOUGH}
        for server, median_s in medians.items() if len(medians) > 1 else ():
            usual_s = statistics.median(each for other, each in medians.items() if other is not server)
            limit_s = max(TIMES * usual_s, usual_s + LEAST_S)
            is_allowed = 2 * (sum(each.is_usable for each in usable) - 1) >= len(balancer.servers)
            if median_s > limit_s and server.is_usable and is_allowed:
                yield server, model, limit_s
