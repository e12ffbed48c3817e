"""The events of one stream between the task that makes them and those that send them."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from app.domain.errors import InvalidRequest, SlowConsumer, StreamEvicted
from app.streams.event import Event

MAX_UNREAD_BYTES = 64 * 1024
MIN_UNREAD_EVENTS = 2
"""That many may wait to be read, however large."""
MAX_READ_BYTES = 32 * 1024
"""Taken at once by a live reader, one event at least."""
MAX_REPLAY_BYTES = 1024 * 1024


class EventLog(Protocol):
    """Written by one stream, in the order of the events' ids."""

    def append(self, event: Event) -> None:
        """Never waits. Raises SlowConsumer where there is no room; a terminal event always has room."""

    async def read(self, after: int) -> list[Event]:
        """The events behind ``after``, at least one, waiting for it; reading on takes the last id read."""


class LiveLog:
    """For one reader that is there from the start: what was read is dropped, what is unread is bounded."""

    def __init__(self, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._events: deque[Event] = deque()
        self._unread_bytes = 0
        self._grown = asyncio.Event()

    def append(self, event: Event) -> None:
        if not event.is_terminal and self._is_full_for(event):
            raise SlowConsumer("The stream was not read as fast as the model answered.")
        self._events.append(event)
        self._unread_bytes += event.size
        self._grown.set()

    def _is_full_for(self, event: Event) -> bool:
        return len(self._events) >= MIN_UNREAD_EVENTS and self._unread_bytes + event.size > self._max_unread_bytes

    async def read(self, after: int) -> list[Event]:
        while not self._events:
            self._grown.clear()
            await self._grown.wait()
        events = [self._events.popleft()]
        size = events[0].size
        while self._events and size + self._events[0].size <= MAX_READ_BYTES:
            events.append(self._events.popleft())
            size += events[-1].size
        self._unread_bytes -= size
        return events


def check_resume(after: int, first_id: int, last_id: int, *, has_ended: bool) -> bool:
    """Whether anything is, or will be, behind ``after`` in a log that still holds ``first_id`` to ``last_id``.

    Raises StreamEvicted where the event behind ``after`` is gone, InvalidRequest where ``after`` was never written.
    """
    if after > last_id:
        raise InvalidRequest("Last-Event-ID names no event of this stream.")
    if after + 1 < first_id:
        raise StreamEvicted("The events behind this id are gone: the stream's buffer keeps the newest only.")
    return not (has_ended and after == last_id)


class ReplayLog:
    """For readers that come, go and come back: the newest events stay, the oldest are dropped.

    ``after``: the last event that was written before this log began.
    """

    def __init__(self, max_bytes: int = MAX_REPLAY_BYTES, *, after: Event | None = None) -> None:
        self._max_bytes = max_bytes
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._grown = asyncio.Event()
        self.last_id = after.id if after else 0
        self.has_ended = after is not None and after.is_terminal

    def append(self, event: Event) -> None:
        self.extend([event])

    def extend(self, events: Iterable[Event]) -> None:
        for event in events:
            self._add(event)
        while self._bytes > self._max_bytes and len(self._events) > 1:
            self._bytes -= self._events.popleft().size
        self.wake()

    async def read(self, after: int) -> list[Event]:
        """Raises StreamEvicted if events after ``after`` have been dropped."""
        while self.last_id <= after:
            await self.grown()
        return self.newer_than(after)

    def resume(self, after: int) -> bool:
        """As :func:`check_resume`."""
        first_id = self._events[0].id if self._events else self.last_id + 1
        return check_resume(after, first_id, self.last_id, has_ended=self.has_ended)

    def newer_than(self, after: int) -> list[Event]:
        """Raises StreamEvicted if events after ``after`` have been dropped."""
        self.resume(after)
        return [event for event in self._events if event.id > after]

    def clear(self) -> None:
        self._events.clear()
        self._bytes = 0

    async def grown(self) -> None:
        await self._grown.wait()

    def wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._bytes += event.size
        self.last_id, self.has_ended = event.id, event.is_terminal
