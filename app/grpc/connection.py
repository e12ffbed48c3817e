"""One HTTP/2 connection on asyncio: passes bytes between transport and session, and events to the calls."""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from app.grpc.frames import ConnectionFailed, DataReceived, Event, HeadersReceived, StreamReset
from app.grpc.http2_session import Session
from app.grpc.messages import error_of_reset, prefix_of
from app.grpc.rpc import RpcError

CLOSE_S = 1.0
_FEW = 4
"""Up to this many output parts are joined. A large body is written without a copy."""
_PING = b"gateway!"
BUSY_GAP_S = 0.001
"""Streams whose responses arrive with smaller gaps are read with pauses, so that one read has several responses."""
REST_S = 0.0025
"""The pause between two reads of such streams."""
_SMALL_READ_BYTES = 4096
"""A larger read is part of a large response, or already has many responses."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Pings after ``interval_s`` without received bytes; the connection fails without an answer in ``timeout_s``."""

    interval_s: float
    timeout_s: float
    without_calls: bool = False
    network_s: float = 20.0
    """The connection fails if TCP gets no acknowledgement of sent bytes, or of a probe while it is idle, for this time.
    Servers do not see the probes, so they may be more frequent than pings."""


class CallEvents(Protocol):
    """The connection's view of a call."""

    def received_headers(self, event: HeadersReceived) -> None: ...
    def received_data(self, event: DataReceived) -> None: ...
    def failed(self, error: RpcError) -> None: ...


class Http2Connection(asyncio.Protocol):
    """Open from ``connection_made`` until ``is_open`` is False. Calls on a lost connection fail with UNAVAILABLE."""

    _transport: asyncio.Transport
    """Set by ``connection_made``."""

    def __init__(self, session: Session, keep_alive: KeepAlive) -> None:
        self.session = session
        self.is_open = False
        self.loop = asyncio.get_running_loop()
        self._keep_alive = keep_alive
        self._received_at = 0.0
        self._heard_at = 0.0
        """When bytes arrived last, or reading began again."""
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._exchanges: dict[int, CallEvents] = {}
        self._awaited: set[int] = set()
        """The calls whose next response must be read at once. There are no pauses while there are any."""
        self._rest: asyncio.TimerHandle | None = None
        """Ends the pause between two reads."""
        self._will_flush = False
        """Whether the output will be flushed at the end of this turn of the event loop."""
        self._lost: asyncio.Future[None] = self.loop.create_future()

    async def room(self) -> None:
        """Waits until a call can start, or until the connection no longer accepts calls."""
        while self.session.accepts_streams and not self.session.has_room:
            self._room.clear()
            await self._room.wait()

    def start(self, exchange: CallEvents, header_block: bytes, message: bytes) -> int:
        """Sends a request. Returns the id of its stream."""
        stream_id = self.session.open(header_block, message, prefix_of(message))
        self._exchanges[stream_id] = exchange
        self.read_at_once(stream_id)
        if not self._will_flush:
            self._will_flush = True
            self.loop.call_soon(self._end_turn)
        return stream_id

    def read_at_once(self, stream_id: int) -> None:
        """Reads without pauses until :meth:`may_rest`, or until the call ends."""
        self._awaited.add(stream_id)
        self._end_rest()

    def may_rest(self, stream_id: int) -> None:
        """Call this after the first of any number of responses: the next ones need not be read at once."""
        self._awaited.discard(stream_id)

    def cancel(self, stream_id: int) -> None:
        """Ends a stream. Its exchange gets no further events."""
        if self._removed(stream_id) is not None:
            self.session.reset(stream_id)
            self.flush()
            self._room.set()
            self._close_if_done()

    def _end_turn(self) -> None:
        """Writes the output of all calls of this turn at once. A write for each call would wake the server early."""
        self._will_flush = False
        self.flush()

    def flush(self) -> None:
        """Writes the session's output now. A no-op for a lost connection."""
        if self.is_open and self.session.has_output:
            output = self.session.take_output()
            if len(output) <= _FEW:
                self._transport.write(b"".join(output))
            else:
                self._transport.writelines(output)

    async def close(self) -> None:
        """Closes the connection; running calls fail."""
        if self.is_open:
            self._close()
            await asyncio.wait({self._lost}, timeout=CLOSE_S)

    def _close(self) -> None:
        self.session.close()
        self.flush()
        self._transport.close()

    def _close_if_done(self) -> None:
        """Closes a connection without calls that accepts no new ones: after GOAWAY, or without further stream ids."""
        if not self._exchanges and self.is_open and not self.session.accepts_streams:
            self._close()

    def fail(self, reason: str) -> None:
        """Aborts the connection at once; running calls fail with UNAVAILABLE."""
        self._transport.abort()
        self._end(reason)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_open = True
        self.flush()
        self._received_at = time.monotonic()
        self._timer = self.loop.call_later(self._keep_alive.interval_s, self._ping_if_silent)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        may_rest = now - self._heard_at < BUSY_GAP_S and len(data) < _SMALL_READ_BYTES
        self._received_at = self._heard_at = now
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
        if not self._exchanges:
            self._close_if_done()
        elif not (self._awaited or self._rest) and may_rest and self.is_open and not self._transport.is_closing():
            # While it rests, a TLS transport may still pass on received bytes.
            self._transport.pause_reading()
            self._rest = self.loop.call_later(REST_S, self._end_rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was lost: {exc}" if exc else "the connection was closed")

    def _dispatch(self, event: Event) -> None:
        """Passes an event to its call, if that was not cancelled."""
        if isinstance(event, DataReceived):
            if (exchange := self._exchange_of(event)) is not None:
                exchange.received_data(event)
        elif isinstance(event, HeadersReceived):
            if (exchange := self._exchange_of(event)) is not None:
                exchange.received_headers(event)
        elif isinstance(event, StreamReset):
            if (exchange := self._removed(event.stream_id)) is not None:
                exchange.failed(error_of_reset(event.code, event.reason))
        else:
            for stream_id in [each for each in self._exchanges if each > event.last_stream_id]:
                if (exchange := self._removed(stream_id)) is not None:
                    exchange.failed(RpcError("UNAVAILABLE", "the server is going away", was_sent=False))

    def _exchange_of(self, event: HeadersReceived | DataReceived) -> CallEvents | None:
        return self._removed(event.stream_id) if event.is_end else self._exchanges.get(event.stream_id)

    def _removed(self, stream_id: int) -> CallEvents | None:
        self._awaited.discard(stream_id)
        return self._exchanges.pop(stream_id, None)

    def _end_rest(self) -> None:
        """Reads again. A no-op if reading is not paused."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
            self._heard_at = time.monotonic()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _ping_if_silent(self, asked_at: float = 0.0) -> None:
        """Fails the connection if no bytes arrived since the ping at ``asked_at``.

        The answer may be queued behind a large response.
        """
        if self._received_at < asked_at:
            self.fail("the server did not answer a ping")
            return
        now, keep_alive = time.monotonic(), self._keep_alive
        silent_s = now - self._received_at
        if silent_s >= keep_alive.interval_s and (keep_alive.without_calls or self._exchanges):
            self.session.ping(_PING)
            self.flush()
            self._timer = self.loop.call_later(keep_alive.timeout_s, self._ping_if_silent, now)
        else:
            wait_s = max(keep_alive.interval_s - silent_s, keep_alive.timeout_s)
            self._timer = self.loop.call_later(wait_s, self._ping_if_silent)

    def _end(self, reason: str) -> None:
        self.is_open, self.session.is_closing = False, True
        if self._timer is not None:
            self._timer.cancel()
        self._room.set()
        if self._rest is not None:
            self._rest.cancel()
        self._awaited.clear()
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.failed(RpcError("UNAVAILABLE", reason))
        if not self._lost.done():
            self._lost.set_result(None)
