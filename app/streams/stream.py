"""Runs a stream: numbers its events, and writes exactly one terminal event, as the last one.

The log of the events is between the task that writes them and the tasks that send them.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from msgspec import Meta

from app.core.answer import Answer
from app.core.errors import (
    DeadlineExceeded,
    GatewayError,
    Internal,
    InvalidRequest,
    Outcome,
    SlowConsumer,
    StreamCancelled,
    StreamEvicted,
)
from app.core.inference import Deadline, IdleTimeout, InferenceResponse
from app.core.json import is_large, json_in_turns, json_of

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
        """Whether the stream has to wait for a reader: another event of the last one's size would exceed the limit."""
        return self._held_bytes > 0 and self._held_bytes + self._last_bytes > self._max_unread_bytes

    def append(self, event: Event) -> None:
        """Adds an event without waiting, even if the log is full, so that a terminal event always fits."""
        self._events.append(event)
        self._last_bytes = size = len(event.data)
        self._held_bytes += size
        if (changed := self._changed) is not None and not changed.done():
            changed.set_result(None)

    async def room(self) -> None:
        """Waits until the log is no longer full. The reading side decides when a reader is too slow."""
        while self.is_full:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    async def read(self, after: int) -> list[Event]:
        """Waits for the events after ``after``, at least one. Pass the last received id to continue."""
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


DROPPED = "The events after this id were dropped: the buffer keeps only the newest events."


def check_resume(after: int, first_id: int, last_id: int, *, has_ended: bool) -> bool:
    """Whether an event after ``after`` exists or can follow, in a log that holds ``first_id`` to ``last_id``.

    Raises StreamEvicted if the next event has been dropped, InvalidRequest if ``after`` was never written.
    """
    if after > last_id:
        raise InvalidRequest("Last-Event-ID names no event of this stream.")
    if after + 1 < first_id:
        raise StreamEvicted(DROPPED)
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


EventLog = LiveLog | ReplayLog
"""Written by one stream, in the order of the events' ids."""


_log = logging.getLogger(__name__)


class Done(TypedDict):
    """The data of the event `done`."""

    reason: Literal["complete", "early_exit"]
    early_exit: str | Sequence[str | None] | None
    outputs: Annotated[int, Meta(ge=0)]
    request_id: str


ProblemOf = Callable[[GatewayError, str], Mapping[str, Any]]
"""Maps an error and the request's id to the problem object of the terminal event."""

_ABANDONED = frozenset(
    {Outcome.CANCELLED, Outcome.TIMEOUT, Outcome.REJECTED, Outcome.CONTRACT_VIOLATION, Outcome.INTERNAL}
)
"""Outcomes that the gateway decides while the model may still be computing."""


@dataclass(kw_only=True, eq=False)
class Stream(ABC):
    """Runs as a separate task after :meth:`start`. Its events are in ``log``. A subclass is told what happens to it.

    ``first_s``: longest time until the model's first response, in seconds. ``progress_s``: longest time between two
    later responses. ``lag_s``: longest time for which Triton keeps responses because the reader is slower than the
    model. ``on_response``: called for each response of the model, before its output is written.
    """

    request_id: str
    responses: AsyncGenerator[InferenceResponse]
    answer: Answer
    deadline: Deadline
    first_s: float
    progress_s: float
    lag_s: float
    problem_of: ProblemOf
    on_response: Callable[[], None]
    log: EventLog = field(default_factory=LiveLog)
    outcome: Outcome | None = field(default=None, init=False)
    early_exit: str | None = field(default=None, init=False)
    outputs: int = field(default=0, init=False)
    error: GatewayError | None = field(default=None, init=False)
    own_s: float = field(default=0.0, init=False)
    """Seconds spent in the gateway for the responses, outside Triton."""
    _last_id: int = field(default=0, init=False)
    _cause: GatewayError | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _lag_s: float = field(default=0.0, init=False)
    """Seconds of waiting for the reader since Triton last kept no response for it."""

    @abstractmethod
    def on_output(self) -> None:
        """Called after each output was written."""

    @abstractmethod
    def on_abandoned(self) -> None:
        """Called when the gateway needs no further response, but the model may still be computing."""

    @abstractmethod
    def on_end(self) -> None:
        """Called once, after the terminal event was written."""

    def start(self) -> asyncio.Task[None]:
        """Starts the task, which ends after it has written the terminal event."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._settle)
        return self._task

    def _settle(self, task: asyncio.Task[None]) -> None:
        """Writes the terminal event of a task that was cancelled, also before its first step."""
        if task.cancelled():
            with suppress(asyncio.CancelledError):
                task.exception()  # until then, it keeps the error, whose frames refer to the task
        if self.outcome is None:
            self._end_with(self._cause or StreamCancelled("The gateway cancelled the stream."))

    def end(self, cause: GatewayError) -> None:
        """Stops the work; the terminal event has the reason. A no-op for a stream that has ended."""
        if self._task is None or self._cause is not None or self._task.done():
            return
        self._cause = cause
        self._task.cancel()

    async def ended(self) -> None:
        """Waits until the terminal event is written."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Writes every response as an output, and then the terminal event."""
        answer, silence = self.answer, IdleTimeout(self.first_s)
        try:
            try:
                async with silence, aclosing(self.responses) as responses:
                    async for response in responses:
                        self.on_response()
                        started = time.perf_counter()
                        values = answer.add(response)
                        if values is not None:
                            # No name holds the text: it would stay in memory until the next response.
                            self._append(
                                "output", b"".join(await json_in_turns(values)) if is_large(values) else json_of(values)
                            )
                        self.own_s += time.perf_counter() - started
                        if self._lag_s and not response.is_behind:
                            self._lag_s = 0.0
                        has_enough = answer.has_enough
                        if has_enough and not response.is_final:
                            self.on_abandoned()
                        del response, values  # otherwise they stay in memory until the next response
                        if has_enough:
                            break
                        if self.log.is_full:
                            silence.pause()
                            await self._wait_for_reader()
                        if silence.idle_s != self.progress_s:
                            silence.change(self.progress_s)
                        silence.renew()
            except TimeoutError as exc:
                raise DeadlineExceeded(f"The model was silent for {silence.idle_s:g} s.") from exc
            await self._finish()
        except GatewayError as exc:
            await self._finish(exc)
        except Exception:
            _log.exception("a stream failed")
            self._end_with(Internal("The gateway failed. Its log shows the cause under the request's id."))

    async def _wait_for_reader(self) -> None:
        """Waits while Triton buffers the model's responses. :meth:`end` and the deadline interrupt the wait."""
        if self._lag_s > self.lag_s:
            raise SlowConsumer(f"The client was too slow: Triton kept outputs for {self.lag_s:g} s.")
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.deadline.remaining_s()):
                await self.log.room()
        except TimeoutError as exc:
            raise DeadlineExceeded("The deadline passed while the client was reading.") from exc
        self._lag_s += time.monotonic() - began

    async def _finish(self, error: GatewayError | None = None) -> None:
        try:
            answer = self.answer
            ending = answer.finish(error) if answer.end is None else await answer.end(error)
            for values in ending.outputs:
                self._append("output", json_of(values))
        except GatewayError as exc:
            self._end_with(exc)
            return
        early_exit = self.early_exit = ending.early_exit
        self.outcome = Outcome.OK if early_exit is None else Outcome.EARLY_EXIT
        done: Done = {
            "reason": "complete" if early_exit is None else "early_exit",
            "early_exit": ending.shown_exit,
            "outputs": self.outputs,
            "request_id": self.request_id,
        }
        self._append("done", json_of(done))
        self.on_end()

    def _end_with(self, error: GatewayError) -> None:
        error.forget_frames()
        self.error, self.outcome = error, error.outcome
        if error.outcome in _ABANDONED:
            self.on_abandoned()
        self._append("error", json_of(self.problem_of(error, self.request_id)))
        self.on_end()

    def _append(self, name: EventName, text: bytes) -> None:
        # A copy, because orjson's result keeps eight times its length in memory.
        event = Event(self._last_id + 1, name, bytes(memoryview(text)))
        self.log.append(event)
        self._last_id = event.id
        if name == "output":
            self.outputs += 1
            self.on_output()
