"""One HTTP/2 connection on asyncio: bytes between the transport and the session, events to the calls."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from app.triton.grpc.events import (
    ConnectionFailed,
    DataReceived,
    GoAway,
    Headers,
    HeadersReceived,
    PingAcknowledged,
    StreamReset,
)
from app.triton.grpc.session import Session
from app.triton.grpc.status import error_of_reset
from app.triton.transport import RpcError

CLOSE_S = 1.0
_PING = b"gateway!"


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """A ping after ``interval_s`` without received bytes; without an answer in ``timeout_s`` the connection is lost."""

    interval_s: float
    timeout_s: float
    without_calls: bool = False


class Exchange(Protocol):
    """The connection's view of a call."""

    def received_headers(self, headers: Headers, *, is_end: bool) -> None: ...
    def received_data(self, data: bytes, size: int, *, is_end: bool) -> None: ...
    def failed(self, error: RpcError) -> None: ...


class Connection(asyncio.Protocol):
    """Open from ``connection_made`` until ``is_open`` is False. Calls on a lost connection fail with UNAVAILABLE."""

    def __init__(self, session: Session, keep_alive: KeepAlive) -> None:
        self.session = session
        self.is_open = False
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._received_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._exchanges: dict[int, Exchange] = {}
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()

    @property
    def accepts_calls(self) -> bool:
        return self.is_open and not self.session.is_closing and self.session.has_ids

    async def room(self) -> None:
        """Waits until the server's limit of concurrent streams allows one more."""
        while self.is_open and len(self.session) >= self.session.max_concurrent_streams:
            self._room.clear()
            await self._room.wait()

    def start(self, exchange: Exchange, header_block: bytes, body: bytes) -> int:
        """Sends a request. Returns the id of its stream."""
        stream_id = self.session.open(header_block, body)
        self._exchanges[stream_id] = exchange
        self.flush()
        return stream_id

    def cancel(self, stream_id: int) -> None:
        """Ends a stream; its exchange hears nothing more."""
        if self._exchanges.pop(stream_id, None) is not None:
            self.session.reset(stream_id)
            self.flush()

    def flush(self) -> None:
        output = self.session.take_output()
        if output and self._transport is not None:
            self._transport.write(output)

    async def close(self) -> None:
        """Ends the connection; calls under way fail."""
        if self.is_open and self._transport is not None:
            self.session.close()
            self.flush()
            self._transport.close()
            await asyncio.wait({self._lost}, timeout=CLOSE_S)

    def fail(self, reason: str) -> None:
        """Drops the connection at once; calls under way fail with UNAVAILABLE."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_open = True
        self.flush()
        self._received_at = self._loop.time()
        self._timer = self._loop.call_later(self._keep_alive.interval_s, self._ping_if_silent)

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        try:
            for event in self.session.receive(data):
                self._dispatch(event)
        except ConnectionFailed as exc:
            self.session.close(exc.code)
            self.flush()
            self.fail(f"the server broke the protocol: {exc}")
            return
        self.flush()
        if not self._room.is_set():
            self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was lost: {exc}" if exc else "the connection was closed")

    def _dispatch(self, event: HeadersReceived | DataReceived | StreamReset | GoAway | PingAcknowledged) -> None:
        if isinstance(event, HeadersReceived):
            self._headers(event)
        elif isinstance(event, DataReceived):
            self._data(event)
        elif isinstance(event, StreamReset):
            self._failed(event.stream_id, error_of_reset(event.code, event.reason))
        elif isinstance(event, GoAway):
            self._going_away(event)

    def _headers(self, event: HeadersReceived) -> None:
        exchange = self._exchanges.get(event.stream_id)
        if exchange is None:
            return
        if event.is_end:
            del self._exchanges[event.stream_id]
        exchange.received_headers(event.headers, is_end=event.is_end)

    def _data(self, event: DataReceived) -> None:
        exchange = self._exchanges.get(event.stream_id)
        if exchange is None:
            return
        if event.is_end:
            del self._exchanges[event.stream_id]
        exchange.received_data(event.data, event.size, is_end=event.is_end)

    def _failed(self, stream_id: int, error: RpcError) -> None:
        exchange = self._exchanges.pop(stream_id, None)
        if exchange is not None:
            exchange.failed(error)

    def _going_away(self, event: GoAway) -> None:
        for stream_id in [each for each in self._exchanges if each > event.last_stream_id]:
            self._failed(stream_id, RpcError("UNAVAILABLE", "the server is going away", was_sent=False))

    def _ping_if_silent(self) -> None:
        silent_s = self._loop.time() - self._received_at
        is_due = silent_s >= self._keep_alive.interval_s and (self._keep_alive.without_calls or self._exchanges)
        if not is_due:
            wait_s = max(self._keep_alive.interval_s - silent_s, self._keep_alive.timeout_s)
            self._timer = self._loop.call_later(wait_s, self._ping_if_silent)
            return
        self.session.ping(_PING)
        self.flush()
        self._timer = self._loop.call_later(self._keep_alive.timeout_s, self._require_answer, self._loop.time())

    def _require_answer(self, asked_at: float) -> None:
        """Any bytes count: a server that sends a large response answers the ping after it."""
        if self._received_at < asked_at:
            self.fail("the server did not answer a ping")
        else:
            self._ping_if_silent()

    def _end(self, reason: str) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._room.set()
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.failed(RpcError("UNAVAILABLE", reason))
        if not self._lost.done():
            self._lost.set_result(None)
