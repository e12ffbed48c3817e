"""One HTTP/2 connection on asyncio: passes bytes between transport and session, and ends the calls with it."""

import asyncio
import time
from dataclasses import dataclass
from struct import Struct

from app.grpc.frames import ConnectionFailed
from app.grpc.http2_session import Http2Stream, Session

CLOSE_S = 1.0
_FEW = 4
"""Up to this many output parts are joined. A large body is written without a copy."""
_PING = b"gateway!"
PREFIX = Struct(">BI")
"""What comes before each message: whether it is compressed, and its length."""
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
        self.awaited: set[Http2Stream] = set()
        """The calls whose next response must be read at once. There are no pauses while there are any."""
        self._rest: asyncio.TimerHandle | None = None
        """Ends the pause between two reads."""
        self._will_flush = False
        """Whether the output will be flushed at the end of this turn of the event loop."""
        self._lost: asyncio.Future[None] = self.loop.create_future()

    async def room(self) -> None:
        """Waits until a call can start, or until the connection no longer accepts calls."""
        while not (self.session.is_closing or self.session.has_room):
            self._room.clear()
            await self._room.wait()

    def start(self, call: Http2Stream, header_block: bytes, message: bytes) -> None:
        """Sends the request of a call at the end of this turn of the event loop, with those of all calls of the turn.

        A write for each call would wake the server early.
        """
        self.session.open(call, header_block, message, PREFIX.pack(0, len(message)))
        self.awaited.add(call)
        if self._rest is not None:
            self._end_rest()
        if not self._will_flush:
            self._will_flush = True
            self.loop.call_soon(self.flush)

    def read_at_once(self, call: Http2Stream) -> None:
        """Reads without pauses until the call is not ``awaited`` any more."""
        self.awaited.add(call)
        self._end_rest()

    def cancel(self, call: Http2Stream) -> None:
        """Ends a call for the server. The call gets no further events."""
        if self.session.reset(call):
            self.awaited.discard(call)
            self.flush()
            self._room.set()
            self._close_if_done()

    def flush(self) -> None:
        """Writes the session's output now. A no-op for a lost connection."""
        self._will_flush = False
        output = self.session.output
        if output and self.is_open:
            self.session.output = []
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
        if self.session.is_closing and not self.session.streams and self.is_open:
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
            self.session.receive(data)
        except ConnectionFailed as exc:
            self.session.close(exc.code)
            self.flush()
            self.fail(f"the server broke the protocol: {exc}")
            return
        self.flush()
        if not self._room.is_set():
            self._room.set()
        if self.session.is_closing:
            self._close_if_done()
        is_busy = may_rest and self.session.streams and not (self.awaited or self._rest)
        if is_busy and self.is_open and not self._transport.is_closing():
            # While it rests, a TLS transport may still pass on received bytes.
            self._transport.pause_reading()
            self._rest = self.loop.call_later(REST_S, self._end_rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was lost: {exc}" if exc else "the connection was closed")

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
        if silent_s >= keep_alive.interval_s and (keep_alive.without_calls or self.session.streams):
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
        calls, self.session.streams = self.session.streams, {}
        for call in calls.values():
            call.was_lost(reason)
        if not self._lost.done():
            self._lost.set_result(None)
