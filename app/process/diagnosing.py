"""Why Triton does not answer at an address, as far as the address itself shows it."""

import asyncio
import socket
from contextlib import suppress

WITHIN_S = 1.0
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: triton\r\nConnection: close\r\n\r\n"


async def wrong_address(url: str) -> str | None:
    """Returns a permanent fault of ``host:port``, for which waiting does not help; None if no fault is known."""
    host, _, port = url.rpartition(":")
    if not host or host.startswith("unix"):
        return None
    try:
        async with asyncio.timeout(WITHIN_S):
            await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return f"the host name '{host}' is not known"
    except TimeoutError:
        return None
    if await _speaks_http(host.strip("[]"), int(port)):
        return "an HTTP server answers there; the gateway needs Triton's gRPC port, usually 8001, not its HTTP port"
    return None


async def _speaks_http(host: str, port: int) -> bool:
    """Whether the port answers HTTP/1.1, which a gRPC port does not."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_REQUEST)
                return (await reader.read(7)).startswith(b"HTTP/1.")
            finally:
                writer.close()
    return False
