"""A gRPC client on asyncio with one connection for new calls, which is opened on demand and reopened after a loss."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from math import ceil
from typing import Any, TypeVar

from hpack import Encoder, NeverIndexedHeaderTuple
from hpack.hpack import encode_integer

from app.grpc.connection import Http2Connection, Http2StreamCall, Http2UnaryCall, KeepAlive
from app.grpc.http2_session import Session
from app.grpc.rpc import LATER_S, Metadata, RpcError

CONNECT_S = 1.0
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 0.25
AnyCall = TypeVar("AnyCall", Http2UnaryCall, Http2StreamCall)


class Client:
    """Implements :class:`app.grpc.rpc.Transport`.

    ``url``: ``host:port`` or ``unix:/path``. Nothing is sent before the first call. ``tls`` creates the context of the
    next connection, which must offer ``h2`` by ALPN. ``authority``: ``host:port`` of the server, if the client connects
    to one of its addresses.
    """

    def __init__(
        self,
        url: str,
        keep_alive: KeepAlive,
        max_message_bytes: int,
        tls: Callable[[], ssl.SSLContext] | None = None,
        authority: str = "",
    ) -> None:
        self._url, self._keep_alive, self._max_message_bytes, self._tls = url, keep_alive, max_message_bytes, tls
        self._authority = "localhost" if url.startswith("unix:") else authority or url
        self._connection: Http2Connection | None = None
        """The newest connection, for new calls."""
        self._connections: set[Http2Connection] = set()
        """Includes older connections whose calls have not ended."""
        self._connecting = asyncio.Lock()
        self._backoff_s = FIRST_BACKOFF_S
        self._next_attempt_at = 0.0
        self._blocks: dict[str, bytes] = {}

    def unary(
        self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()
    ) -> Coroutine[Any, Any, Http2UnaryCall]:
        """Starts a call. Raises RpcError if there is no connection."""
        return self._start(Http2UnaryCall, path, message, timeout_s, metadata)

    def stream(
        self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()
    ) -> Coroutine[Any, Any, Http2StreamCall]:
        """Starts a call with one request message. Raises RpcError if there is no connection."""
        return self._start(Http2StreamCall, path, message, timeout_s, metadata)

    async def _start(
        self, kind: type[AnyCall], path: str, message: bytes, timeout_s: float, metadata: Metadata
    ) -> AnyCall:
        connection = self._connection
        if connection is None or not connection.session.has_room:
            connection, timeout_s = await self._connected(timeout_s)
        block = self._blocks.get(path)
        if block is None:  # the fields of a method are never indexed, so every block can use them
            headers = (
                (":method", "POST"),
                (":scheme", "http" if self._tls is None else "https"),
                (":path", path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "triton-gateway"),
            )
            fields = [NeverIndexedHeaderTuple(*header) for header in headers]
            block = self._blocks[path] = bytes(Encoder().encode(fields, huffman=False))
        timeout = b"%dm" % min(max(round((timeout_s + LATER_S) * 1e3), 1), 99_999_999)
        block += b"%s%c%s" % (_TIMEOUT, len(timeout), timeout)
        for name, value in metadata:
            block += _literal(name.encode("ascii"), value.encode("ascii"))
        call = kind(connection, self._max_message_bytes)
        connection.start(call, block, message, timeout_s)
        return call

    async def close(self) -> None:
        """Closes every connection; running calls fail with UNAVAILABLE."""
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _connected(self, timeout_s: float) -> tuple[Http2Connection, float]:
        """Returns a connection with room for a call, and the remaining time. Raises RpcError."""
        ends = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect()
                while not connection.session.has_room:
                    await connection.room()
                    connection = await self._connect()
        except TimeoutError as exc:
            details = "the deadline passed before the request could be sent"
            raise RpcError("DEADLINE_EXCEEDED", details, was_sent=False) from exc
        return connection, ends - time.monotonic()

    async def _connect(self) -> Http2Connection:
        """Makes one attempt for all waiting callers. Between attempts, calls fail at once. Raises RpcError."""
        async with self._connecting:
            if self._connection is not None and not self._connection.session.is_closing:
                return self._connection
            if time.monotonic() < self._next_attempt_at:
                raise RpcError("UNAVAILABLE", f"no connection to {self._url}", was_sent=False)
            try:
                async with asyncio.timeout(CONNECT_S):
                    self._connection = await self._opened()
            except (OSError, TimeoutError) as exc:
                self._next_attempt_at = time.monotonic() + self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
                text = f"failed to connect to {self._url}: {exc or 'timeout'}"
                raise RpcError("UNAVAILABLE", text, was_sent=False) from exc
            self._backoff_s = FIRST_BACKOFF_S
            self._connections = {each for each in self._connections if each.is_open} | {self._connection}
            return self._connection

    async def _opened(self) -> Http2Connection:
        """Opens a connection. Raises OSError."""
        loop, tls = asyncio.get_running_loop(), self._tls and self._tls()

        def protocol() -> Http2Connection:
            return Http2Connection(Session(), self._keep_alive)

        if self._url.startswith("unix:"):
            _, connection = await loop.create_unix_connection(protocol, self._url.removeprefix("unix:"), ssl=tls)
        else:
            host, _, port = self._url.rpartition(":")
            name = self._authority.rpartition(":")[0].strip("[]") if tls else None
            transport, connection = await loop.create_connection(
                protocol, host.strip("[]"), int(port), ssl=tls, server_hostname=name
            )
            if (connected := transport.get_extra_info("socket")) is None:
                raise ConnectionResetError("the connection was closed at once")
            network_s = self._keep_alive.network_s
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ceil(network_s / 2))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ceil(network_s / 4))
            # Linux resends lost bytes for a quarter of an hour by default.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(network_s * 1000))
        return connection


_TIMEOUT = b"\x10\x0cgrpc-timeout"
"""The start of :func:`_literal` for the header that every call has."""


def _literal(name: bytes, value: bytes) -> bytes:
    """Encodes a header field that no proxy may index, because it may be a secret. Source: RFC 7541, 6.2.3."""
    return b"\x10" + encode_integer(len(name), 7) + name + encode_integer(len(value), 7) + value
