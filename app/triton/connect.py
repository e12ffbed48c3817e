"""Opens the transport to a Triton, with the gateway's own gRPC client or grpcio's, and the engine of a command."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from app.core.engine import InferenceServer
from app.core.errors import UpstreamUnavailable
from app.grpc.client import Client, Options
from app.grpc.connection import KeepAlive
from app.grpc.rpc import Transport
from app.triton.credentials import NO_CREDENTIALS, Credentials, TokenTransport
from app.triton.fleet.addresses import addresses_of
from app.triton.fleet.balancer import Balancer
from app.triton.fleet.member import TritonServer
from app.triton.grpcio import GrpcioTransport
from app.triton.service import DEFAULT_KIND, MAX_MESSAGE_BYTES, Kind
from app.triton.triton_engine import TritonEngine

SLOW_PINGS = KeepAlive(interval_s=300.0, timeout_s=20.0)
"""For servers with default settings, which close a connection (GOAWAY) that pings more often."""
FAST_PINGS = KeepAlive(interval_s=2.0, timeout_s=1.0, without_calls=True)
"""Detects a stopped server within seconds. Only for the embedded Triton, which is started to allow frequent pings."""


@asynccontextmanager
async def open_transport(
    url: str,
    *,
    fast_pings: bool = False,
    kind: Kind = DEFAULT_KIND,
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
        transport = Client(url, Options(pings, MAX_MESSAGE_BYTES, tls=context, authority=authority or url))
    else:
        transport = GrpcioTransport(url, pings, tls, "" if authority == url else authority)
    if credentials.token_file is not None:
        transport = TokenTransport(transport, credentials.token_file)
    try:
        yield transport
    finally:
        await transport.close()


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
            text = f"Nothing answers at {url} (gRPC). Is it Triton's gRPC port, usually 8001?"
            raise UpstreamUnavailable(text) from exc
