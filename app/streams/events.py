"""The log of one stream's events, between the task that writes them and the tasks that send them.

One event of a stream, as stored in the log and sent to clients.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple, Protocol

from app.core.errors import InvalidRequest, StreamEvicted

EventName = Literal["output", "done", "error"]

TERMINAL: frozenset[str] = frozenset({"done", "error"})


class Event(NamedTuple):
    """``id`` counts from 1 without gaps; ``data`` is JSON on one line."""

    id: int
    name: EventName
    data: bytes

    @property
    def is_terminal(self) -> bool:
        return self.name in TERMINAL


MAX_UNREAD_BYTES = 48 * 1024
MAX_READ_BYTES = 32 * 1024
"""Limit of one read of a live log; always at least one event."""
MAX_REPLAY_BYTES = 16 * 1024 * 1024
"""Limit of the events that one resumable stream keeps. A model often writes all of its outputs before the first reader
connects. All streams together have a limit too (``store.py``)."""
MAX_REPLAY_READ_BYTES = 256 * 1024
"""Limit of one read of a kept log, always at least one event: many readers of large streams need little memory."""
MAX_REPLAY_EVENTS = 4096
"""Limit of the events that such a read looks at."""
EVENT_BYTES = 160
"""The overhead of an event in memory."""
STALL_S = 2.0
"""How long a log may stay full. Meanwhile Triton buffers the model's responses without a limit."""


class EventLog(Protocol):
    """Written by one stream, in the order of the events' ids."""

    @property
    def is_full(self) -> bool:
        """Whether the stream has to wait for a reader before the next output."""

    def append(self, event: Event) -> None:
        """Adds an event without waiting, even if the log is full, so that a terminal event always fits."""

    async def room(self) -> None:
        """Waits until the log is no longer full. The reading side decides when a reader is too slow."""

    async def read(self, after: int) -> list[Event]:
        """Waits for the events after ``after``, at least one. Pass the last received id to continue."""


class LiveLog:
    """The log for a single reader that is connected from the start: drops read events and limits unread ones.

    Events of a read count until the next read, because until then they are being sent.
    """

    def __init__(self, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._events: list[Event] = []
        self._held_bytes = 0
        self._taken_bytes = 0
        self._last_bytes = 0
        self._changed: asyncio.Future[None] | None = None
        """One is enough for both sides: if a reader waits, it has read everything, so the log is not full."""

    @property
    def is_full(self) -> bool:
        """Whether another event of the last event's size would exceed the limit."""
        return self._held_bytes > 0 and self._held_bytes + self._last_bytes > self._max_unread_bytes

    def append(self, event: Event) -> None:
        self._events.append(event)
        self._last_bytes = size = len(event.data)
        self._held_bytes += size
        if (changed := self._changed) is not None and not changed.done():
            changed.set_result(None)

    async def room(self) -> None:
        while self.is_full:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    async def read(self, after: int) -> list[Event]:
        self._held_bytes -= self._taken_bytes
        self._taken_bytes = 0
        if (changed := self._changed) is not None and not changed.done():
            changed.set_result(None)
        while not self._events:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        events, self._events, self._taken_bytes = self._events, [], self._held_bytes
        if self._held_bytes > MAX_READ_BYTES:
            count = _count_within(events, MAX_READ_BYTES)
            events, self._events = events[:count], events[count:]
            self._taken_bytes = sum(len(event.data) for event in events)
        return events


def _count_within(events: Sequence[Event], max_bytes: int) -> int:
    """The number of first events that together have at most ``max_bytes``; at least one, if there is one."""
    size = 0
    for count, event in enumerate(events):
        size += len(event.data)
        if size > max_bytes and count:
            return count
    return len(events)


def dropped() -> StreamEvicted:
    return StreamEvicted("The events after this id were dropped: the buffer keeps only the newest events.")


def check_resume(after: int, first_id: int, last_id: int, *, has_ended: bool) -> bool:
    """Whether an event after ``after`` exists or can follow, in a log that holds ``first_id`` to ``last_id``.

    Raises StreamEvicted if the next event has been dropped, InvalidRequest if ``after`` was never written.
    """
    if after > last_id:
        raise InvalidRequest("Last-Event-ID names no event of this stream.")
    if after + 1 < first_id:
        raise dropped()
    return not (has_ended and after == last_id)


class ReplayLog:
    """The log for readers that can disconnect and resume: keeps the newest events and drops the oldest.

    The newest output stays, also when the terminal event follows it.

    ``after``: the id of the last event before the start of this log.
    """

    __slots__ = ("__weakref__", "_bytes", "_events", "_grown", "_max_bytes", "changed", "has_ended", "last_id")
    is_full = False

    def __init__(self, max_bytes: int = MAX_REPLAY_BYTES, *, after: Event | None = None) -> None:
        self._max_bytes = max_bytes
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._grown: asyncio.Event | None = None
        """Created by a waiting reader."""
        self.last_id = after.id if after else 0
        self.has_ended = after is not None and after.is_terminal
        self.changed: Callable[[], None] | None = None
        """Called after events were added."""

    @property
    def size(self) -> int:
        """The memory of the events, in bytes."""
        return self._bytes + EVENT_BYTES * len(self._events)

    def append(self, event: Event) -> None:
        self.extend([event])

    async def room(self) -> None:
        """Does not wait, because the oldest events are dropped."""

    def extend(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.id != self.last_id + 1:  # only Redis drops events in between
                self._events.clear()
                self._bytes = 0
            self._events.append(event)
            self._bytes += len(event.data)
            self.last_id, self.has_ended = event.id, event.is_terminal
        while self._bytes > self._max_bytes and len(self._events) > 1 + self.has_ended:
            self._drop_oldest()
        if self.changed is not None:
            self.changed()
        self.wake()

    def drop_older_half(self) -> bool:
        """Drops the older half of the events, but never the newest one. Returns whether an event was dropped."""
        count = len(self._events) // 2
        for _ in range(count):
            self._drop_oldest()
        return count > 0

    def _drop_oldest(self) -> None:
        self._bytes -= len(self._events.popleft().data)

    def resume(self, after: int) -> bool:
        """Whether an event after ``after`` exists or can follow. Raises StreamEvicted or InvalidRequest."""
        first_id = self._events[0].id if self._events else self.last_id + 1
        return check_resume(after, first_id, self.last_id, has_ended=self.has_ended)

    async def read(self, after: int) -> list[Event]:
        """Returns the next events, up to MAX_REPLAY_READ_BYTES. Raises StreamEvicted if some have been dropped."""
        while self.last_id <= after:
            await self.grown()
        self.resume(after)
        count = self.last_id - after
        if count <= len(self._events) // 2:
            newest = list(islice(reversed(self._events), max(0, count - MAX_REPLAY_EVENTS), count))
            newest.reverse()
        else:
            start = after + 1 - self._events[0].id
            newest = list(islice(self._events, start, start + MAX_REPLAY_EVENTS))
        return newest[: _count_within(newest, MAX_REPLAY_READ_BYTES)]

    async def grown(self) -> None:
        if self._grown is None:
            self._grown = asyncio.Event()
        await self._grown.wait()

    def wake(self) -> None:
        if self._grown is not None:
            self._grown.set()
            self._grown = None
