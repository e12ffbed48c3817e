"""A stream sent to one client: frames as they come, comments while it is silent, never more than the client takes.

Written here rather than with sse-starlette: see docs/decisions/0003-own-event-stream-response.md.
"""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.disconnect import given_up_on_disconnect
from app.api.sse import HEADERS, MEDIA_TYPE, PING, frame_of
from app.api.state import Limits
from app.domain.errors import ClientClosedRequest, SlowConsumer
from app.streams.event import Event
from app.streams.stream import Stream


class StreamResponse(Response):
    """Ends its stream when the client goes away or does not read."""

    media_type = MEDIA_TYPE

    def __init__(self, stream: Stream, opening: list[Event], limits: Limits) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._stream = stream
        self._opening = opening
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with given_up_on_disconnect(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(scope, send)
        except ClientClosedRequest as exc:
            self._stream.end(exc)
        await self._stream.ended()

    async def _send_events(self, scope: Scope, send: Send) -> None:
        events = self._opening
        while not (events and events[-1].is_terminal):
            await self._send(scope, send, b"".join(map(frame_of, events)) if events else PING)
            events = await self._next_events()
        await self._send(scope, send, b"".join(map(frame_of, events)), more=False)

    async def _next_events(self) -> list[Event]:
        """The unread events; none where the model was silent for a while."""
        try:
            async with asyncio.timeout(self._limits.ping_s):
                return await self._stream.log.read()
        except TimeoutError:
            return []

    async def _send(self, scope: Scope, send: Send, body: bytes, *, more: bool = True) -> None:
        """Raises ClientClosedRequest where the client takes nothing, after the stream was ended for it."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        try:
            async with asyncio.timeout(self._limits.send_s):
                return await send(message)
        except TimeoutError:
            self._stream.end(SlowConsumer(f"Nothing was read for {self._limits.send_s:g} s."))
        try:
            async with asyncio.timeout(self._limits.send_s):
                return await send(message)
        except TimeoutError:
            scope["state"]["abort"]()
            raise ClientClosedRequest("The client did not read and was dropped.") from None
