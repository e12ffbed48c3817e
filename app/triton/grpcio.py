"""The transport over grpcio's asyncio client. See :mod:`app.grpc.rpc`."""

import asyncio
import re
import time
from collections import deque
from math import inf
from typing import Any

import grpc

from app.grpc.connection import KeepAlive
from app.grpc.rpc import LATER_S, WAITED_S, BrokenExchange, Metadata, RpcError
from app.triton.credentials import TlsFiles

_OPTIONS = (
    # The default backoff grows to two minutes, so the gateway would notice a recovered Triton late. The minimum is the
    # time limit of an attempt to connect, which on a busy machine takes more than 100 ms.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Limits how much of a response gRPC prefetches. The default grows to megabytes for each stream.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16 * 1024),
)
_PREFETCH_BYTES = 16 * 1024
"""Prefetch limit in bytes; always at least one message."""
_LONGEST_PAUSE_S = 1.0
"""Longest pause within a message that does not fit the prefetch limit, on a busy machine."""
_ERRORS = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError)
_NOT_SENT = re.compile(r"\A(?:Stream removed \()?(?:failed to connect to all addresses|errors resolving )")


class GrpcioTransport:
    """Implements :class:`app.grpc.rpc.Transport`.

    ``authority``: the name of the server, if not that of the address. Changed files of ``tls`` are not reloaded.
    """

    def __init__(
        self, url: str, pings: KeepAlive, max_message_bytes: int, tls: TlsFiles | None = None, authority: str = ""
    ) -> None:
        """Raises CredentialsUnusable."""
        timeout_ms = round(1000 * pings.timeout_s)
        options: list[tuple[str, int | str]] = [
            *_OPTIONS,
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", round(1000 * pings.interval_s)),
            ("grpc.keepalive_timeout_ms", timeout_ms),
        ]
        if pings.without_calls:
            options += [
                ("grpc.http2.ping_timeout_ms", timeout_ms),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        if authority:
            options.append(("grpc.default_authority", authority))
        if tls is None:
            self._channel = grpc.aio.insecure_channel(url, options=options)
            return
        tls.context()  # checks the files
        files = [path and path.read_bytes() for path in (tls.authorities, tls.key, tls.certificate)]
        self._channel = grpc.aio.secure_channel(url, grpc.ssl_channel_credentials(*files), options=options)

    async def unary(self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()) -> "GrpcioUnaryCall":
        call = self._channel.unary_unary(path)(message, timeout=timeout_s + LATER_S, metadata=metadata)
        return GrpcioUnaryCall(call, timeout_s)

    async def stream(self, path: str, message: bytes, timeout_s: float, metadata: Metadata = ()) -> "GrpcioStreamCall":
        ends = time.monotonic() + timeout_s
        call = self._channel.stream_stream(path)(timeout=timeout_s + LATER_S, metadata=metadata)
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(message)
                await call.done_writing()
        except TimeoutError as exc:
            call.cancel()
            raise RpcError("DEADLINE_EXCEEDED", "the deadline passed while the request was sent") from exc
        except _ERRORS as exc:
            raise rpc_error_of(exc) from exc
        except asyncio.CancelledError:
            call.cancel()
            raise
        return GrpcioStreamCall(call, ends - time.monotonic())

    async def close(self) -> None:
        await self._channel.close()


class GrpcioUnaryCall:
    def __init__(self, call: Any, timeout_s: float) -> None:
        self._call = call
        self._ends = time.monotonic() + timeout_s

    def done(self) -> bool:
        return bool(self._call.done())

    def cancel(self) -> None:
        self._call.cancel()

    async def response(self) -> bytes:
        ended = asyncio.Event()
        self._call.add_done_callback(lambda _: ended.set())
        try:
            async with asyncio.timeout(None if self._ends == inf else self._ends - time.monotonic()):
                await ended.wait()
        except TimeoutError as exc:
            self._ends = inf
            raise _deadline_passed() from exc
        try:
            return await self._call  # type: ignore[no-any-return]
        except asyncio.CancelledError as exc:
            raise RpcError("CANCELLED", "the caller cancelled the call") from exc
        except _ERRORS as exc:
            raise rpc_error_of(exc) from exc


class GrpcioStreamCall:
    """Reads the messages in a separate task, because cancelling a read of grpc.aio cancels the call at once."""

    def __init__(self, call: Any, timeout_s: float) -> None:
        self.arrived: float | None = None
        self.gap_s: float | None = None
        self.is_behind = False
        self.waits_since: float | None = None
        self._has_large = False
        """Whether a message was larger than the prefetch limit: Triton writes such a message in several steps."""
        self._interruption: Exception | None = None
        self._call = call
        self._prefetched: deque[bytes] = deque()
        self._prefetched_bytes = 0
        self._end: Exception | None = None
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self._expiry = asyncio.get_running_loop().call_later(timeout_s, self.interrupt, _deadline_passed())
        self._call.add_done_callback(lambda _: self._expiry.cancel())

    def __aiter__(self) -> "GrpcioStreamCall":
        return self

    async def __anext__(self) -> bytes:
        while not self._prefetched:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            self.waits_since = time.monotonic()
            try:
                await self._changed.wait()
            finally:
                self.waits_since = None
                interruption, self._interruption = self._interruption, None
            if interruption is not None and not self._prefetched:
                raise interruption
        message = self._prefetched.popleft()
        if self._prefetched_bytes >= _PREFETCH_BYTES:
            self._changed.set()
        self._prefetched_bytes -= len(message)
        return message

    def time_arrivals(self) -> None:
        """A no-op: every message is read as it arrives."""

    @property
    def is_receiving(self) -> bool:
        """True for a while after each message, because grpcio does not show that the next message has begun."""
        return self._has_large and time.monotonic() - (self.arrived or 0.0) < _LONGEST_PAUSE_S

    def interrupt(self, error: Exception) -> None:
        if self.waits_since is not None:
            self._interruption = error
            self._changed.set()

    def done(self) -> bool:
        return bool(self._call.done())

    def cancel(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            reads_since = time.monotonic()
            while (message := await self._call.read()) is not grpc.aio.EOF:
                now = time.monotonic()
                self.is_behind = self.is_behind and now - reads_since < WAITED_S
                if self.arrived is not None:
                    self.gap_s = now - self.arrived
                self.arrived = now
                self._prefetched.append(message)
                self._prefetched_bytes += len(message)
                self._has_large |= len(message) > _PREFETCH_BYTES
                del message  # frees the memory before the next message arrives
                self._changed.set()
                while self._prefetched_bytes >= _PREFETCH_BYTES:
                    self._changed.clear()
                    await self._changed.wait()
                reads_since = time.monotonic()
                self.is_behind |= reads_since - (self.arrived or reads_since) > WAITED_S
            self._end = StopAsyncIteration()
        except asyncio.CancelledError:
            self._end = RpcError("CANCELLED", "the call was closed")
        except _ERRORS as exc:
            self._end = rpc_error_of(exc)
        except Exception as exc:
            self._end = exc
        self._changed.set()


def _deadline_passed() -> RpcError:
    return RpcError("DEADLINE_EXCEEDED", "the deadline passed")


def rpc_error_of(exc: Exception) -> RpcError:
    """Converts any exception of grpcio."""
    if not isinstance(exc, grpc.aio.AioRpcError):
        return BrokenExchange(f"{type(exc).__name__}: {exc}")
    details = exc.details() or ""
    is_refused = exc.code() is grpc.StatusCode.UNAVAILABLE and _NOT_SENT.match(details)
    return RpcError(exc.code().name, details, was_sent=not is_refused)
