"""The events of one stream between the task that makes them and the one that sends them."""

import asyncio
from collections import deque

from app.domain.errors import SlowConsumer
from app.streams.event import Event

MAX_UNREAD_BYTES = 128 * 1024


class EventLog:
    """One writer, one reader. What was read is dropped; what is unread is bounded."""

    def __init__(self, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._events: deque[Event] = deque()
        self._unread_bytes = 0
        self._grown = asyncio.Event()

    def append(self, event: Event) -> None:
        """Raises SlowConsumer where the reader is too far behind; a terminal event always has room."""
        if self._unread_bytes + len(event.data) > self._max_unread_bytes and self._events and not event.is_terminal:
            raise SlowConsumer("The stream was not read as fast as the model answered.")
        self._events.append(event)
        self._unread_bytes += len(event.data)
        self._grown.set()

    async def read(self) -> list[Event]:
        """All unread events, at least one."""
        while not self._events:
            self._grown.clear()
            await self._grown.wait()
        events = list(self._events)
        self._events.clear()
        self._unread_bytes = 0
        return events
