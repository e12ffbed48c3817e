"""Adds servers to a balancer and removes them when the addresses of Triton change."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from app.triton.fleet.addresses import host_and_port
from app.triton.fleet.balancer import Balancer
from app.triton.fleet.member import TritonServer

DRAIN_POLL_S = 0.1
_log = logging.getLogger(__name__)

OpenServer = Callable[[str], AbstractAsyncContextManager[TritonServer]]
RESOLVE_S = 5.0
"""Interval at which a DNS name is resolved, and the timeout of one attempt."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Resolves a host and a port to the IP addresses of the host. Raises OSError."""


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Returns the IPv4 addresses, or the IPv6 addresses if there are none. Raises OSError.

    It never returns both, because a machine with addresses of both families runs only one Triton.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {family: [str(info[4][0]) for info in found if info[0] == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, [])


class ServerPool:
    """``names``: fixed addresses, or one DNS name, whose addresses are followed."""

    def __init__(
        self, names: tuple[str, ...], balancer: Balancer, open_server: OpenServer, resolve: Resolve = resolve_by_system
    ) -> None:
        self._names = names
        self._balancer = balancer
        self._open_server = open_server
        self._resolve = resolve
        self._stacks: dict[TritonServer, AsyncExitStack] = {}
        self._is_resolving = len(names) == 1
        self._has_failed = False

    async def open(self) -> None:
        """Adds the first servers. They share the requests equally from the start, without a slow start."""
        await self.follow()
        for server in self._balancer.servers:
            server.joined_at = 0.0

    async def run(self) -> None:
        """Follows the DNS name until cancelled, and closes servers that have left when they are idle."""
        while True:
            ends = asyncio.get_running_loop().time() + RESOLVE_S
            while asyncio.get_running_loop().time() < ends:
                await asyncio.sleep(DRAIN_POLL_S)
                for server in list(self._stacks):
                    if server.is_leaving and not server.in_flight:
                        await self._remove(server)
            if self._is_resolving:
                await self.follow()

    async def follow(self) -> None:
        """Adds new addresses. Removed addresses get no further requests."""
        wanted = frozenset(self._names)
        if self._is_resolving:
            try:
                host, port = host_and_port(self._names[0])
                async with asyncio.timeout(RESOLVE_S):
                    hosts = await self._resolve(host, port)
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
