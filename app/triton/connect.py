"""Opens the transport to a Triton, with the gateway's own gRPC client or grpcio's, and the engine of a command."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from app.core.engine import InferenceServer
from app.core.errors import UpstreamUnavailable
from app.grpc.client import Client, Options
from app.grpc.connection import KeepAlive
from app.grpc.rpc import Transport
from app.triton.credentials import NO_CREDENTIALS, Credentials, TlsFiles, TokenTransport
from app.triton.fleet.addresses import addresses_of
from app.triton.fleet.balancer import Balancer
from app.triton.fleet.member import TritonServer
from app.triton.grpcio import FAST_PING_OPTIONS, SLOW_PING_OPTIONS, GrpcioTransport
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
    opened = _asyncio if kind == "asyncio" else _grpcio
    transport = opened(url, authority or url, credentials.tls, fast_pings=fast_pings)
    if credentials.token_file is not None:
        transport = TokenTransport(transport, credentials.token_file)
    try:
        yield transport
    finally:
        await transport.close()


def _asyncio(url: str, authority: str, tls: TlsFiles | None, *, fast_pings: bool) -> Transport:
    pings = FAST_PINGS if fast_pings else SLOW_PINGS
    context = None if tls is None else tls.followed()
    return Client(url, Options(pings, MAX_MESSAGE_BYTES, tls=context, authority=authority))


def _grpcio(url: str, authority: str, tls: TlsFiles | None, *, fast_pings: bool) -> Transport:
    pings = FAST_PING_OPTIONS if fast_pings else SLOW_PING_OPTIONS
    named = () if authority == url else (("grpc.default_authority", authority),)
    return GrpcioTransport(url, (*pings, *named), None if tls is None else tls.channel_credentials())


@asynccontextmanager
async def open_engine(url: str, credentials: Credentials) -> AsyncIterator[InferenceServer]:
    """Opens an engine for a command. ``url``: see ``GATEWAY_TRITON_URL``.

    If there are several addresses, their models are compared. Raises UpstreamUnavailable with
    the address, ValueError or CredentialsUnusable.
    """
    try:
        async with _opened(url, credentials) as engine:
            yield engine
    except UpstreamUnavailable as exc:
        raise UpstreamUnavailable(f"Nothing answers at {url} (gRPC). Is it Triton's gRPC port, usually 8001?") from exc


@asynccontextmanager
async def _opened(url: str, credentials: Credentials) -> AsyncIterator[InferenceServer]:
    async with AsyncExitStack() as stack:
        engines = {
            address: TritonEngine(await stack.enter_async_context(open_transport(address, credentials=credentials)))
            for address in addresses_of(url)
        }
        if len(engines) == 1:
            yield next(iter(engines.values()))
            return
        balancer = Balancer()
        balancer.servers += [TritonServer(address, engine) for address, engine in engines.items()]
        yield balancer
