"""A client of a resumable stream: it starts the stream, reads it over several connections, and may delete it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from app.core.errors import Outcome
from tests.live.chaos.client import READ_BYTES, Ask, Break, Client, Ending, Manner, Seen, port_of
from tests.live.chaos.reply import Reply, of_end
from tests.toolkit.events import Event, checked, parsed

Deletion = Literal["not asked", "uncertain", "done"]
"""Uncertain: the gateway may have deleted the stream, but did not confirm it."""
BUSY = {429, 503}
"""Statuses after which the client asks again."""
AGAIN_S = 0.1


class StreamClient(Client):
    """The connection of the POST stays open until the client is done, so its worker is the one that runs the stream."""

    def __init__(self, ask: Ask, manner: Manner, has_gateway: Callable[[], bool]) -> None:
        """``has_gateway``: whether the gateway still runs, so that it makes sense to ask again."""
        super().__init__(ask, manner)
        self._has_gateway = has_gateway
        self._gateway_port = 0
        self._path = ""
        self._events: list[Event] = []
        self._deletion: Deletion = "not asked"
        self._breaks: list[Break] = []
        self._refused_reads = 0

    async def run(self, port: int) -> Seen:
        self._gateway_port = port
        return await super().run(port)

    def _seen(self, ending: Ending, began: float) -> Seen:
        seen = super()._seen(ending, began)
        if self._path:
            outcomes = self._outcomes() if self._has_ended else frozenset[str]()
            seen = replace(seen, ending="answered" if self._has_ended else ending, outcomes=outcomes)
        return replace(seen, breaks=tuple(self._breaks), refused_reads=self._refused_reads)

    def _outcomes(self) -> frozenset[str]:
        """Empty, which matches nothing, for a stream that was cancelled although its client did not delete it."""
        outcomes = of_end(checked(self._events)[-1])
        return frozenset() if outcomes == {Outcome.CANCELLED} and self._deletion == "not asked" else frozenset(outcomes)

    @property
    def _has_ended(self) -> bool:
        return bool(self._events) and self._events[-1].name != "output"

    async def _read(self, reader: asyncio.StreamReader) -> Ending:
        """Reads the answer to the POST, then the stream."""
        while (reply := Reply.of(self.received)) is None or not reply.is_whole:
            data = await reader.read(READ_BYTES)
            if not data:
                return "lost"
            self.received += data
        if reply.status != 201:
            return "answered"
        self._path, self._stage = reply.headers["location"], "reading"
        return "left" if self._manner.then == "leaves" else await self._read_stream()

    async def _read_stream(self) -> Ending:
        drops = list(self._manner.drops)
        while not self._has_ended:
            status = await self._read_events(drops[0] if drops else None)
            if status == 200:
                drops = drops[1:]
            elif status in BUSY or not status:
                await asyncio.sleep(AGAIN_S)
            else:
                return "deleted" if status == 404 and self._deletion != "not asked" else "missing"
            if not status and not self._has_gateway():
                return "lost"
        return "answered"

    async def _read_events(self, stop: int | None) -> int:
        """Reads the next events over one connection, at most ``stop``. Returns the status; 0 without an answer.

        After its deletion the stream is read to its end: until then the worker that runs it may still be killed.
        """
        before = len(self._events)

        async def has_enough(reply: Reply) -> bool:
            if reply.status != 200:
                return reply.is_whole
            self._events[before:] = parsed(reply.body[: reply.body.rfind(b"\n\n") + 2].decode())
            await self._maybe_delete()
            is_dropping = stop is not None and len(self._events) >= before + stop and self._deletion == "not asked"
            return self._has_ended or is_dropping

        return await self._asked("GET", has_enough)

    async def _maybe_delete(self) -> None:
        """Deletes the stream after its first output, while this client reads it."""
        if self._manner.then != "deletes" or self._deletion != "not asked" or not self._events:
            return
        self._deletion = "uncertain"

        async def is_answered(reply: Reply) -> bool:
            assert reply.status in {204, *BUSY}, reply
            if reply.is_whole:
                self._deletion = "done" if reply.status == 204 else "uncertain"
            return reply.is_whole

        await self._asked("DELETE", is_answered)

    async def _asked(self, method: str, has_enough: Callable[[Reply], Awaitable[bool]]) -> int:
        """Sends one request over its own connection. Returns the status; 0 without an answer.

        ``has_enough`` is called with each part of the answer. A connection that ends before is noted as a break.
        """
        began, port, reply, is_enough = time.monotonic(), 0, None, False
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._gateway_port, limit=READ_BYTES)
            port, received = port_of(writer), b""
            try:
                writer.write(self._request(method))
                while not is_enough and (data := await reader.read(READ_BYTES)):
                    received += data
                    reply = Reply.of(received)
                    is_enough = reply is not None and await has_enough(reply)
            finally:
                writer.transport.abort()
        if not is_enough:
            self._breaks.append(Break(port, began, time.monotonic()))
        status = 0 if reply is None else reply.status
        self._refused_reads += status == 429
        return status

    def _request(self, method: str) -> bytes:
        after = f"Last-Event-ID: {len(self._events)}\r\n" if method == "GET" and self._events else ""
        return f"{method} {self._path} HTTP/1.1\r\nHost: localhost\r\n{after}Connection: close\r\n\r\n".encode()
