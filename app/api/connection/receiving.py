"""Receives the bytes of a connection. A large body is received directly into its memory, without a copy."""

import asyncio
from collections.abc import Callable

from app.api.connection.framing import LengthBody
from app.api.exchange import BodySink
from app.domain.errors import GatewayError

LARGE_BYTES = 64 * 1024
"""The smallest number of missing bytes that are received directly into the memory of their body."""
MOST_AT_ONCE = 1024 * 1024
"""Limit of the bytes received in one step of the event loop, a fraction of a millisecond."""
HEAD_BYTES = 16 * 1024
"""The most bytes that are received with a head. The application must see the head before it has memory for the body."""
PART_BYTES = 256 * 1024
"""The most bytes of a body that are received at once and copied."""


class ReceivingRoom:
    """The memory into which the connections of one event loop receive, one after the other."""

    def __init__(self) -> None:
        self.part = memoryview(bytearray(PART_BYTES))
        self.head = self.part[:HEAD_BYTES]


class LargeBody:
    """A body that is received into the memory of its sink. ``on_complete`` is called with its last byte."""

    def __init__(self, body: LengthBody, sink: BodySink, on_complete: Callable[[], None]) -> None:
        self.error: GatewayError | None = None
        self.ended = asyncio.Event()
        self._body = body
        self._sink = sink
        self._on_complete = on_complete

    def room(self) -> memoryview:
        return self._sink.room(min(self._body.missing, MOST_AT_ONCE))

    def filled(self, size: int) -> None:
        self._body.missing -= size
        try:
            self._sink.filled(size)
        except GatewayError as error:
            self.error = error
        if self.error is not None:
            self.ended.set()
        elif self._body.is_complete:
            self._on_complete()
            self.ended.set()


class Receiver(asyncio.BufferedProtocol):
    """The protocol of a connection's transport, because uvicorn's protocol, ``owner``, cannot choose the memory."""

    __slots__ = ("_owner", "_room", "is_in_body", "large_body")

    def __init__(self, owner: asyncio.Protocol, room: ReceivingRoom) -> None:
        self.is_in_body = False
        """Whether a head has arrived, but not all of its body."""
        self.large_body: LargeBody | None = None
        """The body that receives the next bytes, instead of ``owner``."""
        self._owner = owner
        self._room = room

    def get_buffer(self, _size_hint: int) -> memoryview:
        if self.large_body is not None:
            return self.large_body.room()
        return self._room.part if self.is_in_body else self._room.head

    def buffer_updated(self, size: int) -> None:
        if self.large_body is None:
            self._owner.data_received(bytes(self._room.part[:size]))
            return
        self.large_body.filled(size)
        if self.large_body.ended.is_set():
            self.large_body = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)
        self._end_body()

    def eof_received(self) -> bool | None:
        self._end_body()
        return self._owner.eof_received()

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def _end_body(self) -> None:
        if self.large_body is not None:
            self.large_body.ended.set()
            self.large_body = None
