"""The addresses of ``GATEWAY_TRITON_URL``: a fixed list, or those that one DNS name has at the moment."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

RESOLVE_S = 5.0
"""A DNS name is resolved again after this time. Also how long one attempt may take."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port -> the IP addresses of the host. Raises OSError."""


def addresses_of(url: str) -> tuple[str, ...]:
    """``host:port`` or ``unix:/path``, several separated by commas. Raises ValueError."""
    found = tuple(dict.fromkeys(part.strip() for part in url.split(",")))
    for address in found:
        if not address.startswith("unix:"):
            _host_and_port(address)
        elif address == "unix:":
            raise ValueError("a path must follow `unix:`")
    return found


def is_name(address: str) -> bool:
    """Whether a resolver may know several addresses for it. ``localhost`` is this machine."""
    if address.startswith("unix:"):
        return False
    host, _ = _host_and_port(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


async def resolved(name: str, resolve: Resolve) -> frozenset[str]:
    """The addresses behind ``host:port``, each with the port. Raises OSError, TimeoutError among them."""
    host, port = _host_and_port(name)
    async with asyncio.timeout(RESOLVE_S):
        hosts = await resolve(host, port)
    return frozenset(f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts)


async def resolve_by_system(host: str, port: int) -> list[str]:
    """IPv4 addresses if there are any: a machine with addresses of both families is one Triton. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {family: [str(info[4][0]) for info in found if info[0] == family] for family, *_ in found}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, [])


def _host_and_port(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"'{address[:100]}' is no address; expected host:port or unix:/path")
    return host.strip("[]"), int(port)
