"""Provides classes for asynchronous code: background tasks, retry delays, shared answers, and rates.

The classes are independent of each other.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, exp, inf
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Keeps a reference to each task until the task ends, and logs an unexpected exception."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], object] = {}

    def start(self, work: Coroutine[Any, Any, None], subject: object = None) -> None:
        """Does nothing if a task with the same subject runs."""
        if subject is not None and subject in self._tasks.values():
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks[task] = subject
        task.add_done_callback(self._ended)

    async def close(self, within_s: float | None = None) -> None:
        """Waits for the running tasks. Cancels those that take longer than ``within_s`` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), within_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task failed unexpectedly", exc_info=error)


@dataclass(slots=True)
class Backoff:
    """Delays between retries.

    The delay is ``first_s`` after the first failure, doubled with each further failure, at most ``longest_s``. If there
    is no failure for ``forgiven_s`` after a delay, the next one is the first again.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    failures: int = 0
    due_at: float = 0.0
    """Seconds on ``time.monotonic``."""
    forgiven_s: float = inf

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.due_at

    def fail(self) -> float:
        """Returns the delay until the next attempt, in seconds."""
        if time.monotonic() - self.due_at > self.forgiven_s:
            self.failures = 0
        delay_s = min(self.first_s * 2.0 ** min(self.failures, 16), self.longest_s)
        self.failures += 1
        self.due_at = time.monotonic() + delay_s
        return delay_s

    def reset(self) -> None:
        self.failures, self.due_at = 0, 0.0


Answer = TypeVar("Answer")


class Fresh(Generic[Answer]):
    """An answer that is asked for again only after ``fresh_s`` seconds, so that many callers cost as much as one.

    Callers that wait get the same answer.
    """

    def __init__(self, ask: Callable[[], Awaitable[Answer]], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._known: tuple[float, Answer] | None = None

    async def current(self) -> Answer:
        """Raises what ``ask`` raises; the next call then asks again."""
        async with self._lock:
            if self._known is None or time.monotonic() >= self._known[0]:
                answer = await self._ask()
                self._known = time.monotonic() + self._fresh_s, answer
            return self._known[1]


WINDOW_S = 5.0
LONGEST_S = 30


class DrainRate:
    """How quickly something, such as bytes or connections, becomes free. Recent amounts count most."""

    def __init__(self) -> None:
        self._recent = 0.0
        self._at = 0.0

    def left(self, amount: float, now: float) -> None:
        self._recent = self._recent * exp((self._at - now) / WINDOW_S) + amount
        self._at = now

    def retry_after_s(self, amount: float, now: float) -> int:
        """Returns the whole seconds until this amount is expected to be free: at least 1; 1 without measurements."""
        if not self._recent:
            return 1
        rate = self._recent * exp((self._at - now) / WINDOW_S) / WINDOW_S
        return min(max(ceil(amount / rate), 1), LONGEST_S) if rate * LONGEST_S > amount else LONGEST_S


class LeakyBucket:
    """A rate limit that delays events. Events within the rate, and up to ``burst`` together, are not delayed."""

    def __init__(self, per_s: float, burst: float, longest_s: float = inf) -> None:
        """``longest_s``: the longest delay of an event."""
        self._interval_s = 1 / per_s
        self._burst_s = burst / per_s
        self._longest_s = longest_s
        self._next_at = 0.0

    def turn(self, now: float) -> float:
        """Reserves the time of the next event, on the clock of ``now``, in seconds. It may be in the past."""
        due_at = max(self._next_at, now - self._burst_s) + self._interval_s
        self._next_at = min(due_at, now + self._longest_s)
        return self._next_at
