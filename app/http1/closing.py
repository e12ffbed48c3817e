"""Ends a connection so that the client can read its answer, and gives every state of a connection a timeout.

``ClosingProtocol`` extends uvicorn's protocol. ``LazyEvent`` keeps the memory of a connection small.
"""

import asyncio
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from socket import AF_UNIX, IPPROTO_TCP, TCP_NOTSENT_LOWAT
from typing import Any, Literal, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class LazyEvent:
    """An event that uses memory only if something waits for it.

    Creates its ``asyncio.Event`` for the first waiter, because most connections never have one.
    """

    __slots__ = ("_event", "_is_set")

    def __init__(self, *, is_set: bool) -> None:
        self._is_set = is_set
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()
            self._event = None

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> Literal[True]:
        if not self._is_set:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()
        return True


READING_S = 0.001
"""In this time the event loop reads what has arrived."""


class Timer:
    """A timeout of a connection: :meth:`start` replaces an earlier one.

    After a turn that took long, uvloop runs timers before it reads, so the action waits until what has arrived is read:
    reading may stop the timer.
    """

    __slots__ = ("_loop", "pending")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.pending: asyncio.TimerHandle | None = None

    def start(self, delay_s: float, action: Callable[[], None]) -> None:
        self.stop()
        self.pending = self._loop.call_later(delay_s, self._let_read, action)

    def stop(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None

    def _let_read(self, action: Callable[[], None]) -> None:
        self.pending = self._loop.call_later(READING_S, action)


LINGER_S = 2.0
"""After its last answer the connection is closed if the client sends less than LINGER_STEP_BYTES in this time."""
LINGER_STEP_BYTES = 64 * 1024
MAX_LINGER_S = 30.0
"""Limit of the time for a client that still sends; closing earlier would reset the connection."""
MAX_LINGER_BYTES = 128 * 1024 * 1024
"""Limit of the bytes that are received and dropped. Firefox reads an answer only after it has sent the whole body."""
MAX_UNSENT_BYTES = 16 * 1024
"""Unsent bytes in the transport above which the writer of an answer waits."""
MAX_KERNEL_UNSENT_BYTES = 128 * 1024
"""Limit of the unsent bytes in the kernel. Its default is megabytes, which would hide the progress of a slow client."""
DISCONNECT_CHECK_S = 1.0
FIRST_RESET_CHECK_S = 0.001
HALF_CLOSED_S = 10.0
"""How long a client that has closed its side is waited for: a network may lose the reset of a closed connection."""
INTERIM_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients ignore it (RFC 9110, 15.2), but if the client has closed its connection, its system resets it."""
_CLOSED_BY_CLIENT = getattr(select, "POLLRDHUP", 0)
"""The client closed its side, even if unread data comes before the end."""
_NOTHING_WAITS: deque[tuple[RequestResponseCycle, ASGI3Application]] = deque()
"""uvicorn's queue of pipelined requests, always empty: the gateway parses one request at a time."""


class ClosingProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a timeout for each state and an orderly close."""

    __slots__ = ("_disconnect_timer", "_dropped_bytes", "_unsent_timer", "is_ending", "state_timer")
    # Attributes in slots, because an instance with more than 30 others has a separate dictionary of 1.5 KiB.

    def __init__(self, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.pipeline = _NOTHING_WAITS
        self.state_timer, self._unsent_timer, self._disconnect_timer = (Timer(self.loop) for _ in range(3))
        self.is_ending = False
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow._is_writable_event = cast("asyncio.Event", LazyEvent(is_set=True))
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        connection = transport.get_extra_info("socket")
        if connection.family != AF_UNIX:
            connection.setsockopt(IPPROTO_TCP, TCP_NOTSENT_LOWAT, MAX_KERNEL_UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_ending = True
        for timer in (self.state_timer, self._unsent_timer, self._disconnect_timer):
            timer.stop()
        super().connection_lost(exc)

    def end(self, *, lingers: bool) -> None:
        """Closes the connection when everything is sent. If it lingers, drops the bytes that the client still sends."""
        if self.is_ending or self.transport.is_closing():
            return
        self.is_ending = True
        self.state_timer.stop()
        self._watch_unsent()
        if lingers:
            self.flow.resume_reading()
            self.transport.write_eof()
            self._linger(self.loop.time() + MAX_LINGER_S)
        else:
            self.transport.close()

    def drop(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > MAX_LINGER_BYTES:
            self.transport.close()

    def _linger(self, until: float) -> None:
        needed = self._dropped_bytes + LINGER_STEP_BYTES

        def check() -> None:
            if self._dropped_bytes < needed or self.loop.time() >= until:
                self.transport.close()
            else:
                self._linger(until)

        self.state_timer.start(LINGER_S, check)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.is_ending:
            self._unsent_timer.stop()

    def _watch_unsent(self) -> None:
        """Aborts the connection if the client reads nothing of the answer for the time of the keep-alive."""
        before = self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() < before:
                self._watch_unsent()
            else:
                self.transport.abort()

        self._unsent_timer.start(self.timeout_keep_alive, check)

    def watch_for_disconnect(self) -> None:
        """Checks for a disconnect once a second, because the event loop does not notice it while reading is paused."""
        if self._disconnect_timer.pending is None:
            self._disconnect_timer.start(DISCONNECT_CHECK_S, self._check_for_disconnect)

    def _check_for_disconnect(self) -> None:
        self._disconnect_timer.stop()
        if self.flow.read_paused and has_event(self.transport, _CLOSED_BY_CLIENT):
            self.transport.abort()
        elif self.flow.read_paused:
            self.watch_for_disconnect()

    def watch_for_reset(self) -> None:
        """Finds out whether the client has closed its connection, or only its side of it and waits for the answer."""
        self.transport.write(INTERIM_ANSWER)
        until = self.loop.time() + HALF_CLOSED_S
        self._disconnect_timer.start(FIRST_RESET_CHECK_S, partial(self._check_for_reset, FIRST_RESET_CHECK_S, until))

    def _check_for_reset(self, pause_s: float, until: float) -> None:
        """An answer that has begun needs no limit, because its writing fails after a reset."""
        if self.transport.is_closing():
            return
        is_late = self.loop.time() >= until
        if has_event(self.transport) or (is_late and not self.cycle.response_started):
            self.transport.abort()
        elif not is_late:
            pause_s = min(2 * pause_s, DISCONNECT_CHECK_S)
            self._disconnect_timer.start(pause_s, partial(self._check_for_reset, pause_s, until))


def has_event(transport: asyncio.Transport, event: int = 0) -> bool:
    """Whether the kernel reports the event, or POLLERR or POLLHUP: the connection was reset."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))
