"""Sends a stream's events to one client, as fast as the client reads: decision 0003."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus
from starlette.types import Message, Receive, Scope, Send

from app.api.disconnect import CancelledOnDisconnect
from app.api.exchange import Connection, Exchange
from app.api.limits import Limits
from app.api.sse import HEADERS, PING, frame_of
from app.domain.errors import ClientClosedRequest, GatewayError, SlowConsumer, StreamEvicted, UpstreamUnavailable
from app.streams.event import Event
from app.streams.log import STALL_S

AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
"""sse-starlette patches uvicorn to cut streams at a signal. The gateway's drain lets streams go on for a while."""


class Events(Protocol):
    @property
    def is_full(self) -> bool:
        """Whether the stream waits for this client."""

    async def read(self, after: int) -> list[Event]:
        """StreamEvicted or UpstreamUnavailable ends the answer without a terminal event: the client may ask again."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where an answer starts: behind which event, with which bytes, and the events that are at hand already."""

    after: int = 0
    preamble: bytes = b""
    events: Sequence[Event] = ()


class StreamResponse(EventSourceResponse):
    """``on_left`` is called if the client goes away or does not read; ``closing`` is awaited at the very end.

    Replaces what decision 0003 found wanting: one task per stream, all events at hand in one send, and a limit for
    clients that do not read. The drain ends streams by their terminal event, not by a signal.
    """

    def __init__(
        self,
        events: Events,
        limits: Limits,
        *,
        start: Start,
        on_left: Callable[[GatewayError], None],
        closing: Callable[[], Awaitable[None]],
    ) -> None:
        bodies = _bodies(events, start, limits.ping_s)
        super().__init__(bodies, headers=HEADERS, ping=limits.ping_s, send_timeout=limits.send_s, sep="\n")
        del self.headers["connection"]  # the HTTP protocol decides whether a connection stays open
        self._bodies = bodies
        self._events = events
        self._send_s = limits.send_s
        self._on_left = on_left
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        try:
            with CancelledOnDisconnect(exchange):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_bodies(exchange.connection, send)
        except ClientClosedRequest as exc:
            self._on_left(exc)
        finally:
            await self._closing()

    async def _send_bodies(self, connection: Connection | None, send: Send) -> None:
        async with aclosing(self._bodies) as bodies:
            async for body in bodies:
                await self._send(connection, send, {"type": "http.response.body", "body": body, "more_body": True})
                del body  # otherwise it stays in memory until the next one comes
        await self._send(connection, send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, connection: Connection | None, send: Send, message: Message) -> None:
        """Ends the stream with `slow_consumer` if the client takes nothing; aborts the connection `send_s` later."""
        if await self._is_taken(connection, send, message):
            return
        self._on_left(SlowConsumer("The client did not read the stream."))
        try:
            async with asyncio.timeout(self._send_s):
                await send(message)
        except TimeoutError:
            if connection is not None:
                connection.abort()
            raise ClientClosedRequest("The client did not read and was disconnected.") from None

    async def _is_taken(self, connection: Connection | None, send: Send, message: Message) -> bool:
        """False if not one byte moved for `send_s`, or for STALL_S while the stream waits for this client."""
        send_s, still_s = self._send_s, 0.0
        step_s = min(STALL_S, send_s)
        while still_s < (step_s if self._events.is_full else send_s):
            before = _unsent_bytes(connection)
            try:
                async with asyncio.timeout(step_s):
                    await send(message)
                    return True
            except TimeoutError:
                still_s = 0.0 if _unsent_bytes(connection) < before else still_s + step_s
        return False


def _unsent_bytes(connection: Connection | None) -> int:
    return 0 if connection is None else connection.unsent_bytes


async def _bodies(events: Events, start: Start, ping_s: float) -> AsyncGenerator[bytes]:
    """The frames of all events at hand, up to the terminal event; a comment if there was no event for a while."""
    after, body, found = start.after, start.preamble, start.events
    del start  # its events are not kept
    with suppress(StreamEvicted, UpstreamUnavailable):
        while not (found and found[-1].is_terminal):
            body += b"".join(map(frame_of, found))
            after, found = found[-1].id if found else after, ()
            yield body or PING
            body = b""
            found = await _next(events, after, ping_s)
    yield body + b"".join(map(frame_of, found))


async def _next(events: Events, after: int, ping_s: float) -> list[Event]:
    """The events after ``after``; none if there was none for ``ping_s``."""
    try:
        async with asyncio.timeout(ping_s):
            return await events.read(after)
    except TimeoutError:
        return []
