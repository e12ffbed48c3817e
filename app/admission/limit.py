"""Adaptive limits on the number of concurrent requests to a model (decision 9). Pure: no I/O, no clock."""

from collections.abc import Hashable
from math import ceil, inf

from app.core.errors import TooManyRequests
from app.core.model import Capacity

WINDOW_S = 0.25
WINDOW_ANSWERS = 16
"""Minimum duration and minimum number of answers of a measurement."""
STEP = 1.5
GAIN = 1.15
"""A higher limit is kept if it multiplies the throughput by at least this factor."""
LOSS = 0.92
"""A lower limit is kept if at least this fraction of the throughput remains."""
LONGEST_PAUSE = 32
"""Maximum number of measurements between two attempts in a direction that did not help."""
QUEUE_S = 0.25
"""Work for this time may always be in Triton. It fills the batches of every step of an ensemble. The search does not
find that limit, because a single change of the limit changes the throughput too little."""
HIGHEST = 4096


class Limit:
    """A fixed limit, and the base class of those that learn."""

    rising_s = 0.0
    """How long after ``rose_at`` the limit may still rise so fast that requests which begin to wait run soon."""
    rose_at = -inf

    def __init__(self, value: int) -> None:
        self.value = value

    def started(self, request: Hashable, now: float) -> None:
        """Call this when a request gets its slot."""

    def output(self, request: Hashable, now: float) -> None:
        """Call this when an output of a decoupled model arrives."""

    def ended(self, request: Hashable, now: float, error: BaseException | None, *, is_full: bool) -> None:
        """Call this when a request was answered or failed. ``is_full``: whether another one waits for its slot."""

    def pass_time(self, now: float) -> float | None:
        """Call this while requests wait. Returns the seconds until the next call, or None if no call is needed."""


class ThroughputLimit(Limit):
    """Searches for the lowest limit that does not reduce the throughput. Measures only while requests wait.

    From time to time it tries a higher or a lower limit, and keeps the limit if the throughput allows it. It compares
    throughput instead of latency. Inputs of different sizes or a Triton that pauses can therefore distort only one
    attempt.
    """

    def __init__(self, capacity: Capacity, processes: int = 1) -> None:
        self._instances = ceil(capacity.instances / processes)
        self._lowest = self._instances + 1
        super().__init__(min(max(self._lowest, ceil(capacity.requests / processes)), HIGHEST))
        self._base = self.value
        self._base_rate = 0.0
        """Answers per second with the limit ``_base``."""
        self._best_rate = 0.0
        """The highest recent ``_base_rate``. Several steps down together may not cost more than one step may."""
        self._peak_rate = 0.0
        self._trial = 0
        """1 while a higher limit is tried, -1 while a lower limit is tried, otherwise 0."""
        self._next_trial = 1
        self._answers = self._full = self._enough = 0
        self._since = 0.0
        self._pause = {1: 1, -1: 1}
        self._paused = 0
        self._begin_window(0.0, 1)

    def ended(self, request: Hashable, now: float, error: BaseException | None, *, is_full: bool) -> None:
        """Counts answers. Lowers the limit if Triton's own queue is full."""
        if error is None:
            self._answers += 1
            self._full += is_full
            if self._answers == 0:
                self._since, self._full = now, 0
            elif self._answers >= self._enough and now - self._since >= WINDOW_S:
                self._end_window(now)
        elif isinstance(error, TooManyRequests):
            self._set_base(max(self._lowest, int(self._base / STEP)))

    def _begin_window(self, now: float, answers: int) -> None:
        """``answers``: the number of answers to skip first, because their requests ran under another limit."""
        self._since = now
        self._full = 0
        self._answers = -answers
        self._enough = max(WINDOW_ANSWERS, 2 * self.value) * (2 if self._trial else 1)

    def _end_window(self, now: float) -> None:
        before = self.value
        rate = self._answers / (now - self._since)
        if self._full < 0.9 * self._answers:
            self._end_trial(self._base)  # too few requests to reach the limit
            self._begin_window(now, before if self.value != before else 0)
            return
        self._peak_rate = max(rate, 0.95 * self._peak_rate)
        floor = min(max(self._lowest, int(QUEUE_S * self._peak_rate)), HIGHEST)
        if self._base < floor:
            self._set_base(floor)
        elif self._trial:
            self._keep_or_revert(rate, floor)
        else:
            self._base_rate = 0.7 * self._base_rate + 0.3 * rate if self._base_rate else rate
            self._best_rate = max(self._base_rate, 0.99 * self._best_rate)
            self._paused += 1
            if self._paused >= self._pause[self._next_trial]:
                direction, self._next_trial, self._paused = self._next_trial, -self._next_trial, 0
                value = ceil(self._base * STEP if direction > 0 else self._base / STEP)
                value = min(max(value, floor), HIGHEST)
                if value != self._base:
                    self._trial, self.value = direction, value
        self._begin_window(now, before if self.value != before else 0)

    def _keep_or_revert(self, rate: float, floor: int) -> None:
        """Keeps the new limit, or returns to the previous limit."""
        direction = self._trial
        if rate >= (GAIN * self._base_rate if direction > 0 else LOSS * self._best_rate):
            self._base_rate = rate
            self._pause[direction] = 1
            self._next_trial = direction
            self._end_trial(max(self.value, floor))
        else:
            self._pause[direction] = min(2 * self._pause[direction], LONGEST_PAUSE)
            self._end_trial(self._base)

    def _set_base(self, value: int) -> None:
        self._base_rate = 0.0
        self._end_trial(value)

    def _end_trial(self, value: int) -> None:
        self._trial, self._base, self.value = 0, value, value
