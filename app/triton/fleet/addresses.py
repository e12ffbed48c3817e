"""The addresses of ``GATEWAY_TRITON_URL``: a fixed list, or the current addresses of one DNS name."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

RESOLVE_S = 5.0
"""Interval at which a DNS name is resolved, and the timeout of one attempt."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Resolves a host and a port to the IP addresses of the host. Raises OSError."""


def addresses_of(url: str) -> tuple[str, ...]:
    """Splits addresses separated by commas: ``host:port`` or ``unix:/path``. Raises ValueError."""
    found = tuple(dict.fromkeys(part.strip() for part in url.split(",")))
    for address in found:
        if not address.startswith("unix:"):
            _host_and_port(address)
        elif address == "unix:":
            raise ValueError("a path must follow `unix:`")
    return found


def is_name(address: str) -> bool:
    """Whether the address is a DNS name that may have several IP addresses. ``localhost`` is not."""
    if address.startswith("unix:"):
        return False
    host, _ = _host_and_port(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


async def resolved(name: str, resolve: Resolve) -> frozenset[str]:
    """Resolves ``host:port`` to addresses with the same port. Raises OSError, including TimeoutError."""
    host, port = _host_and_port(name)
    async with asyncio.timeout(RESOLVE_S):
        hosts = await resolve(host, port)
    return frozenset(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts)


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Returns the IPv4 addresses, or the IPv6 addresses if there are none. Raises OSError.

    It never returns both, because a machine with addresses of both families runs only one Triton.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {family: [str(info[4][0]) for info in found if info[0] == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, [])


def _host_and_port(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"'{address[:100]}' is not an address; expected host:port or unix:/path")
    return host.strip("[]"), int(port)
