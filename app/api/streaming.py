"""Sends a stream's events to one client as Server-Sent Events, as fast as the client reads.

Source: WHATWG HTML, "Server-sent events". sse-starlette formats the events;
docs/decisions/0006-event-streams.md has the reasons for a response of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, get_args

from sse_starlette import ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.bodies import Limits
from app.api.error_table import ROW_BY_ERROR
from app.api.exchange import Exchange
from app.core.aio import IdleTimeout
from app.core.errors import ClientClosedRequest, GatewayError, SlowConsumer, StreamEvicted, UpstreamUnavailable
from app.streams.store import Reader
from app.streams.stream import STALL_S, TERMINAL, Event, EventLog, EventName, Stream

PING = ServerSentEvent(comment="", sep="\n").encode()
"""A heartbeat comment, which readers ignore."""
RETRY = ServerSentEvent(retry=1000, sep="\n").encode()
"""The delay in milliseconds before a browser's EventSource reconnects."""

MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"}
"""Keep proxies from storing, compressing and buffering the stream."""
_FRAMES = {name: ServerSentEvent("%b", event=name, id="%d", sep="\n").encode() for name in get_args(EventName)}
"""A frame for each event name, with placeholders for the id and the data."""


AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
"""sse-starlette patches uvicorn to end streams on a signal, but the gateway's drain lets running streams continue."""


Events = EventLog | Reader
"""What is sent: ``is_full`` means that the stream waits for this client.

StreamEvicted or UpstreamUnavailable ends the answer without a terminal event: the client may retry.
"""


class StreamResponse(Response):
    """``on_left`` is called if the client disconnects or does not read; ``closing`` is awaited at the end.

    A dialect with a different event format has its own subclass.

    Differs from sse-starlette's response (decision 6): one task per stream, all available events in one send, and a
    limit for clients that do not read. The drain ends streams with their terminal event, not with a signal.
    """

    ping = PING
    """The heartbeat, sent on an idle stream."""
    preamble = b""
    """Sent before the first event."""

    def __init__(
        self,
        events: Events,
        limits: Limits,
        *,
        opening: Sequence[Event] = (),
        on_left: Callable[[GatewayError], None],
        closing: Callable[[], Awaitable[None]],
    ) -> None:
        """``opening``: the first events, if they are there already."""
        super().__init__(headers=HEADERS, media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self.after = 0
        """The id of the last event that the client has received."""
        self._events = events
        self._has_ended = False
        self._opening = opening
        self._ping_s = limits.ping_s
        self._send_s = limits.send_s
        self._on_left = on_left
        self._closing = closing

    @classmethod
    def of(cls, stream: Stream, opening: Sequence[Event], limits: Limits) -> Self:
        """The response of a stream that ends with its request. ``opening``: its first events."""
        return cls(stream.log, limits, opening=opening, on_left=stream.end, closing=stream.ended)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        self._connection, self._send = exchange.connection, send
        try:
            with exchange.cancelled_on_disconnect():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                exchange.forget_request()
                opening, self._opening = self._opening, ()
                await self._deliver(self.preamble + self._frames_of(opening) or self.ping)
                del opening  # is not kept
                try:
                    await self._relay()
                    error = self.error_of(exchange)
                except (StreamEvicted, UpstreamUnavailable) as exc:  # the events end without a terminal event
                    error = type(exc)
                if error is not None and ROW_BY_ERROR[error].is_of_replica:
                    exchange.connection.end_after_answer()
                await self._deliver(b"", more_body=False)
        except ClientClosedRequest as exc:
            self._on_left(exc)
        finally:
            await self._closing()

    @staticmethod
    def frame_of(event: Event) -> bytes:
        """Renders an event, whose data is JSON text on one line."""
        return _FRAMES[event.name] % (event.id, event.data)

    def error_of(self, exchange: Exchange) -> type[GatewayError] | None:
        """The error of the terminal event, if the event is an error."""
        error = exchange.record.error
        return None if error is None else type(error)

    async def _relay(self) -> None:
        """Sends the events up to the terminal event, and heartbeats while the stream is idle."""
        while not self._has_ended:
            try:
                async with IdleTimeout(self._ping_s) as silence:
                    while not self._has_ended:
                        body = self._frames_of(await self._events.read(self.after))
                        silence.pause()
                        await self._deliver(body)
                        del body  # otherwise it stays in memory until the next event
                        silence.renew()
            except TimeoutError:
                await self._deliver(self.ping)

    def _frames_of(self, events: Sequence[Event]) -> bytes:
        """The next frames to send."""
        if events:
            self.after, self._has_ended = events[-1].id, events[-1].name in TERMINAL
        return b"".join(map(self.frame_of, events))

    async def _deliver(self, body: bytes, *, more_body: bool = True) -> None:
        """Ends the stream with `slow_consumer` if the client makes no progress, and later aborts the connection.

        No progress: no byte was sent for `send_s`, or for STALL_S while the stream waits for this client.
        """
        message = {"type": "http.response.body", "body": body, "more_body": more_body}
        connection, send_s, still_s = self._connection, self._send_s, 0.0
        if not connection.unsent_bytes:  # then the connection accepts the message at once
            await self._send(message)
            return
        step_s = min(STALL_S, send_s)
        while still_s < (step_s if self._events.is_full else send_s):
            before = connection.unsent_bytes
            try:
                async with asyncio.timeout(step_s):
                    await self._send(message)
                    return
            except TimeoutError:
                still_s = 0.0 if connection.unsent_bytes < before else still_s + step_s
        self._on_left(SlowConsumer("The client did not read the stream."))
        try:
            async with asyncio.timeout(send_s):
                await self._send(message)
        except TimeoutError:
            connection.abort()
            raise ClientClosedRequest("The client stopped reading and was disconnected.") from None
