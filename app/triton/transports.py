"""Opens the transport to a Triton: the gateway's own gRPC client, or grpcio's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.triton.credentials import NO_CREDENTIALS, Credentials, TlsFiles, TokenTransport
from app.triton.grpc.client import Client, Options
from app.triton.grpc.connection import KeepAlive
from app.triton.grpcio import PATIENT_PING_OPTIONS, TIGHT_PING_OPTIONS, GrpcioTransport
from app.triton.transport import DEFAULT_KIND, MAX_MESSAGE_BYTES, Kind, Transport

PATIENT_PINGS = KeepAlive(interval_s=300.0, timeout_s=20.0)
"""A server with default settings closes a connection (GOAWAY) that pings more often."""
TIGHT_PINGS = KeepAlive(interval_s=2.0, timeout_s=1.0, without_calls=True)
"""Notices a stopped server within seconds. Only for a Triton that was started to allow them: the embedded Triton."""


@asynccontextmanager
async def open_transport(
    url: str,
    *,
    tight_pings: bool = False,
    kind: Kind = DEFAULT_KIND,
    authority: str = "",
    credentials: Credentials = NO_CREDENTIALS,
) -> AsyncIterator[Transport]:
    """``url``: ``host:port`` or ``unix:/path``. Nothing is sent before the first call.

    ``kind``: the gateway's own client, or grpcio's. ``authority``: the name of the server if ``url`` is only one of
    its addresses. Raises CredentialsUnusable.
    """
    opened = _asyncio if kind == "asyncio" else _grpcio
    transport = opened(url, authority or url, credentials.tls, tight_pings=tight_pings)
    if credentials.token_file is not None:
        transport = TokenTransport(transport, credentials.token_file)
    try:
        yield transport
    finally:
        await transport.close()


def _asyncio(url: str, authority: str, tls: TlsFiles | None, *, tight_pings: bool) -> Transport:
    pings = TIGHT_PINGS if tight_pings else PATIENT_PINGS
    context = None if tls is None else tls.followed()
    return Client(url, Options(pings, MAX_MESSAGE_BYTES, tls=context, authority=authority))


def _grpcio(url: str, authority: str, tls: TlsFiles | None, *, tight_pings: bool) -> Transport:
    pings = TIGHT_PING_OPTIONS if tight_pings else PATIENT_PING_OPTIONS
    named = () if authority == url else (("grpc.default_authority", authority),)
    return GrpcioTransport(url, (*pings, *named), None if tls is None else tls.channel_credentials())
