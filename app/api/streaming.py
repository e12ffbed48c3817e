"""A stream's events sent to one client: frames as they come, comments while it is silent, never more than it takes.

Written here rather than with sse-starlette: see docs/decisions/0003-own-event-stream-response.md.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.api.disconnect import given_up_on_disconnect
from app.api.sse import HEADERS, MEDIA_TYPE, PING, frame_of
from app.api.state import Limits
from app.domain.errors import ClientClosedRequest, GatewayError, SlowConsumer, StreamEvicted, UpstreamUnavailable
from app.streams.event import Event
from app.streams.log import STALL_S


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


class StreamResponse(Response):
    """``on_left`` is told when the client went away or does not read; ``closing`` is awaited at the very end."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        events: Events,
        limits: Limits,
        *,
        start: Start,
        on_left: Callable[[GatewayError], None],
        closing: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._limits = limits
        self._start = start
        self._on_left = on_left
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with given_up_on_disconnect(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_all(scope, send)
        except ClientClosedRequest as exc:
            self._on_left(exc)
        finally:
            await self._closing()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        start, self._start = self._start, Start()
        after, body, events = start.after, start.preamble, start.events
        del start  # what was sent is not kept
        with suppress(StreamEvicted, UpstreamUnavailable):
            while not (events and events[-1].is_terminal):
                body += b"".join(map(frame_of, events))
                after, events = events[-1].id if events else after, ()
                await self._send(scope, send, body or PING)
                body = b""
                events = await self._next(after)
        await self._send(scope, send, body + b"".join(map(frame_of, events)), more=False)

    async def _next(self, after: int) -> list[Event]:
        """The events behind ``after``; none where the model was silent for a while."""
        try:
            async with asyncio.timeout(self._limits.ping_s):
                return await self._events.read(after)
        except TimeoutError:
            return []

    async def _send(self, scope: Scope, send: Send, body: bytes, *, more: bool = True) -> None:
        """Ends the stream with `slow_consumer` if the client takes nothing; aborts the connection `send_s` later."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if await self._is_taken(scope, send, message):
            return None
        self._on_left(SlowConsumer("The client did not read the stream."))
        try:
            async with asyncio.timeout(self._limits.send_s):
                return await send(message)
        except TimeoutError:
            scope["state"]["abort"]()
            raise ClientClosedRequest("The client did not read and was dropped.") from None

    async def _is_taken(self, scope: Scope, send: Send, message: Message) -> bool:
        """False if not one byte moved for `send_s`, or for STALL_S while the stream waits for this client."""
        unsent_bytes: Callable[[], int] = scope["state"].get("unsent_bytes", lambda: 0)
        send_s, still_s = self._limits.send_s, 0.0
        step_s = min(STALL_S, send_s)
        while still_s < (step_s if self._events.is_full else send_s):
            before = unsent_bytes()
            try:
                async with asyncio.timeout(step_s):
                    await send(message)
                    return True
            except TimeoutError:
                still_s = 0.0 if unsent_bytes() < before else still_s + step_s
        return False
