"""How the gateway reaches a Triton: its address, the transport, and the methods that are not inference.

Source: Triton's ``grpc_service.proto``.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any, Literal

from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from app.grpc.client import Client
from app.grpc.connection import KeepAlive
from app.grpc.rpc import RpcError, Transport
from app.shared_memory.leases import Ask, RegistryFailed
from app.triton.credentials import NO_CREDENTIALS, Credentials, TokenTransport
from app.triton.grpcio import GrpcioTransport

Kind = Literal["asyncio", "grpcio"]
"""The gateway's own client; grpcio's is the reference."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Size limit of each request and response: one message of a model must not fill the gateway's memory."""
SLOW_PINGS = KeepAlive(interval_s=300.0, timeout_s=20.0)
"""For servers with default settings, which close a connection (GOAWAY) that pings more often."""
FAST_PINGS = KeepAlive(interval_s=2.0, timeout_s=1.0, without_calls=True)
"""Detects a stopped server within seconds. Only for the embedded Triton, which is started to allow frequent pings."""


@asynccontextmanager
async def open_transport(
    url: str,
    *,
    fast_pings: bool = False,
    kind: Kind = "asyncio",
    authority: str = "",
    credentials: Credentials = NO_CREDENTIALS,
) -> AsyncIterator[Transport]:
    """Opens a transport. It sends nothing before the first call.

    Args:
        url: ``host:port`` or ``unix:/path``.
        kind: the gateway's own client, or grpcio's.
        authority: the name of the server, if ``url`` is only one of its addresses.
        fast_pings: whether the server allows frequent keepalive pings.
        credentials: TLS and token.

    Raises:
        CredentialsUnusable: If a credentials file is invalid.
    """
    tls = credentials.tls
    transport: Transport
    pings = FAST_PINGS if fast_pings else SLOW_PINGS
    if kind == "asyncio":
        context = None if tls is None else tls.followed()
        transport = Client(url, pings, MAX_MESSAGE_BYTES, context, authority or url)
    else:
        transport = GrpcioTransport(url, pings, MAX_MESSAGE_BYTES, tls, "" if authority == url else authority)
    if credentials.token_file is not None:
        transport = TokenTransport(transport, credentials.token_file)
    try:
        yield transport
    finally:
        await transport.close()


def path_of(method: str) -> str:
    return f"/inference.GRPCInferenceService/{method}"


async def call_control(transport: Transport, request: Message, timeout_s: float) -> Any:
    """Calls a method other than inference, which follows from the message types. Raises RpcError or DecodeError."""
    method = type(request).__name__.removesuffix("Request")
    call = await transport.unary(path_of(method), request.SerializeToString(), timeout_s)
    try:
        return getattr(service_pb2, f"{method}Response").FromString(await call.response())
    finally:
        call.cancel()


_REGISTRY_TIMEOUT_S = 1.0


def registry_of(transport: Transport) -> Ask:
    """Asks Triton about regions of shared memory."""

    async def ask(method: str, **fields: Any) -> Any:
        request = getattr(service_pb2, f"{method}Request")(**fields)
        try:
            return await call_control(transport, request, _REGISTRY_TIMEOUT_S)
        except (RpcError, DecodeError) as exc:
            raise RegistryFailed(str(exc)) from exc

    return ask


def addresses_of(url: str) -> tuple[str, ...]:
    """Splits addresses separated by commas: ``host:port`` or ``unix:/path``. The settings have checked each."""
    return tuple(dict.fromkeys(part.strip() for part in url.split(",")))


def is_name(address: str) -> bool:
    """Whether the address is a DNS name that may have several IP addresses. ``localhost`` is not."""
    if address.startswith("unix:"):
        return False
    host, _ = host_and_port(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


PROBE_S = 1.0
HTTP_PORT = "an HTTP server answers there; the gateway needs Triton's gRPC port, usually 8001, not its HTTP port"


async def wrong_address(url: str) -> str | None:
    """Returns why Triton does not answer at ``host:port``, as far as the address itself shows it.

    The fault is permanent, so waiting does not help; None if no fault is known.
    """
    if url.startswith(("unix", ":")) or ":" not in url:
        return None
    host, port = host_and_port(url)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S):
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except socket.gaierror:
                return f"the host name '{host}' is not known"
            with closing(writer):
                writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: triton\r\nConnection: close\r\n\r\n")
                return HTTP_PORT if (await reader.read(7)).startswith(b"HTTP/1.") else None
    return None
