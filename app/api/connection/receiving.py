"""Receives a large body directly into its memory, without a copy in the gateway."""

import asyncio
from collections.abc import Callable

from app.api.exchange import BodySink
from app.domain.errors import GatewayError

LARGE_BYTES = 64 * 1024
"""The smallest number of missing bytes for which the protocol is changed."""
MOST_AT_ONCE = 1024 * 1024
"""Limit of the bytes received in one step of the event loop, a fraction of a millisecond."""


class BodyReceiver(asyncio.BufferedProtocol):
    """The protocol of a connection's transport while ``missing`` bytes of a body arrive, instead of ``owner``.

    ``pause``: stops reading. It is called as soon as the body is complete, because the memory has no room for more.
    """

    def __init__(self, owner: asyncio.Protocol, sink: BodySink, missing: int, pause: Callable[[], None]) -> None:
        self.missing = missing
        self.error: GatewayError | None = None
        self.ended = asyncio.Event()
        self._owner = owner
        self._sink: BodySink | None = sink
        self._pause = pause

    def release(self) -> None:
        """Drops the reference to the body, because uvloop's transport keeps this protocol after a change."""
        self._sink = self.error = None

    def get_buffer(self, _size_hint: int) -> memoryview:
        assert self._sink is not None
        return self._sink.room(min(self.missing, MOST_AT_ONCE))

    def buffer_updated(self, size: int) -> None:
        assert self._sink is not None
        self.missing -= size
        try:
            self._sink.filled(size)
        except GatewayError as error:
            self.error = error
        if self.error is not None or not self.missing:
            self._pause()
            self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)
        self.ended.set()

    def eof_received(self) -> bool | None:
        self.ended.set()
        return self._owner.eof_received()

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
