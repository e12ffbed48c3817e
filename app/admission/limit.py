"""Adaptive limits on the number of concurrent requests or streams of a model (decision 9). Pure: no I/O, no clock."""

from collections.abc import Hashable
from math import ceil, inf

from app.core.errors import TooManyRequests

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

    def __init__(self, instances: int, requests: int, processes: int = 1) -> None:
        self._lowest = ceil(instances / processes) + 1
        super().__init__(min(max(self._lowest, ceil(requests / processes)), HIGHEST))
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
        elif direction := self._trial:
            if rate >= (GAIN * self._base_rate if direction > 0 else LOSS * self._best_rate):
                self._base_rate, self._pause[direction], self._next_trial = rate, 1, direction
                self._end_trial(max(self.value, floor))
            else:
                self._pause[direction] = min(2 * self._pause[direction], LONGEST_PAUSE)
                self._end_trial(self._base)
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

    def _set_base(self, value: int) -> None:
        self._base_rate = 0.0
        self._end_trial(value)

    def _end_trial(self, value: int) -> None:
        self._trial, self._base, self.value = 0, value, value


STREAMS = 8
"""The number of streams that may wait for their first output while nothing is known about the model."""
DOUBLING_S = 0.5
"""If first outputs take this time, as many streams may try as are proven."""
MOST_GROWTH = 3.0
"""If first outputs take longer, at most this many times as many may try, but no more than ``COLD_STREAMS``."""
COLD_S = 0.5
"""Time without any first output after which more streams start than :data:`STREAMS`."""
COLD_DOUBLING_S = 0.35
COLD_STREAMS = 128
"""The largest number of streams that start before the first output of any stream."""
IN_TIME_S = 1.0
"""An output that arrives sooner is never late. A busy engine answers in bursts with gaps of 0.5 to 0.7 s."""
LATE = 3.0
"""An output is late if it takes this many times as long as others did."""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 8.0
"""Time until the limit grows again after a late first output. It doubles with each late first output in a row."""
FAILURES = 3
"""The growth stops after at least this many streams that waited and did not raise the proven number."""
BRIEF_S = 2.0
"""Streams that end sooner after their first output are brief."""
WEIGHT = 0.1
"""The weight of the newest time in a moving average."""
CUT = 0.8


class _Stream:
    """``running``: how many streams ran when it started, including this one."""

    __slots__ = ("first_at", "gaps", "last_at", "running", "started_at")

    def __init__(self, now: float, running: int) -> None:
        self.started_at = self.first_at = self.last_at = now
        self.running = running
        self.gaps = 0
        """The number of outputs after the first one."""

    def is_slow(self, now: float) -> bool:
        """Whether the stream produces outputs much more slowly than before."""
        return self.gaps > 0 and now - self.last_at > _late_s((self.last_at - self.first_at) / self.gaps)


class StreamLimit(Limit):
    """The highest number of streams that the model has proved to run, plus a window of streams that try for more.

    A first output shows that the model has room for its stream, long before a stream ends. The number of streams
    without a first output is never higher than the window, so a full model holds at most that many in its own queue.
    """

    def __init__(self, instances: int, requests: int, processes: int = 1) -> None:
        self._lowest = ceil(instances / processes) + 1
        self._fewest = ceil(STREAMS / processes)
        self._most_cold = ceil(COLD_STREAMS / processes)
        self._proven = float(max(ceil(requests / processes) - self._fewest, 0))
        """The most streams that produced outputs at the same time. With the window it starts as configured."""
        self._window = HIGHEST
        """How many more streams may try. After a late first output 0, then 1; it doubles if there was room for them."""
        self._cold = self._fewest
        """Like ``_window``, before the first output of any stream."""
        self._risen = 0.0
        """How much ``_proven`` has risen since the window changed."""
        self._failures = 0
        """How many streams tried since ``_proven`` has risen, and did not raise it."""
        self._pending: dict[Hashable, _Stream] = {}
        """The streams without an output, oldest first."""
        self._producing: dict[Hashable, _Stream] = {}
        """The other streams."""
        self._typical_s: float | None = None
        """Moving average of the time to the first output."""
        self._in_time_s = 0.0
        """The same, without late first outputs."""
        self._producing_s: float | None = None
        """Moving average of the time from the first output of a stream to its end."""
        self._quickest_s = inf
        self._newest_start = -inf
        """The latest start of a stream that has had an output."""
        self._stopped_at = self._grows_at = self._cut_at = -inf
        self._pause_s = PAUSE_S
        super().__init__(0)
        self._update()

    def started(self, request: Hashable, now: float) -> None:
        """Call this when a stream gets its slot."""
        self._pending[request] = _Stream(now, len(self._pending) + len(self._producing) + 1)

    def output(self, request: Hashable, now: float) -> None:
        """Call this when an output of a stream arrives."""
        stream = self._producing.get(request)
        if stream is not None:
            stream.last_at = now
            stream.gaps += 1
            return
        stream = self._pending.pop(request, None)
        if stream is None:  # it started under the limit of an earlier configuration
            return
        self._producing[request] = stream
        stream.first_at = stream.last_at = now
        self._check_wait(stream, now)
        wait_s = now - stream.started_at
        if wait_s <= _late_s(self._quickest_s):
            self._in_time_s = wait_s if self._typical_s is None else average(self._in_time_s, wait_s)
        self._newest_start = max(self._newest_start, stream.started_at)
        self._quickest_s = min(wait_s, 1.01 * self._quickest_s)
        self._typical_s = average(self._typical_s, wait_s)
        if stream.started_at > self._cut_at:
            self._learn_level(stream, now)
        self._update()

    def ended(self, request: Hashable, now: float, error: BaseException | None, *, is_full: bool) -> None:
        stream = self._producing.pop(request, None)
        if stream is not None:
            self._producing_s = average(self._producing_s, now - stream.first_at)
        self._pending.pop(request, None)
        if self._pending:
            self._check_wait(next(iter(self._pending.values())), now)
        if isinstance(error, TooManyRequests):  # Triton's own queue is full
            self._stop(now, cuts=True)
        self._update()

    def pass_time(self, now: float) -> float | None:
        """Lets the limit grow without an event: after a pause, and while no stream has had an output yet."""
        wait_s: float | None = None
        if self._window == 0:
            wait_s = self._grows_at - now
            if wait_s <= 0:
                self._window, self._risen, wait_s = 1, 0.0, None
        elif self._typical_s is None and self._pending and self._cold < self._most_cold:
            waited_s = now - next(iter(self._pending.values())).started_at
            doublings = int((waited_s - COLD_S) / COLD_DOUBLING_S) + 1 if waited_s >= COLD_S else 0
            if doublings:
                self._cold = min(self._fewest * 2**doublings, self._most_cold)
            wait_s = COLD_S + doublings * COLD_DOUBLING_S - waited_s
        self._update()
        return wait_s

    def _learn_level(self, stream: _Stream, now: float) -> None:
        """Raises ``_proven`` if more streams than before produce outputs now, none of them slowly.

        Brief streams, such as those with one output, hardly ever produce outputs at the same time. Then those count
        that ran at the start, unless the first output is late.
        """
        if self._producing_s is not None and self._producing_s < BRIEF_S:
            if stream.running > self._proven and now - stream.started_at <= _late_s(self._quickest_s):
                self._rise(now, 0.25)
        elif len(self._producing) > self._proven:
            if sum(not each.is_slow(now) for each in self._producing.values()) > self._proven:
                self._rise(now, 1.0)
        elif stream.running > self._proven and now - stream.started_at > 2 * self._quickest_s:
            # Its first output came only because other streams ended.
            self._failures += 1
            if self._window and self._failures >= max(min(self._room(), self._fewest), FAILURES):
                self._stop(now)

    def _check_wait(self, stream: _Stream, now: float) -> None:
        """Stops the growth if a stream waits too long for its first output, and lowers a limit that does not grow.

        A stream that others overtook has a large input: a full model would have started the others later.
        """
        wait_s = now - stream.started_at
        if self._typical_s is None or stream.started_at < self._newest_start or stream.started_at <= self._stopped_at:
            return
        if self._window and wait_s > _late_s(self._typical_s):
            self._stop(now)
        elif not self._window and wait_s > _late_s(self._quickest_s):
            self._stop(now, cuts=True)

    def _rise(self, now: float, streams: float) -> None:
        self._proven = min(self._proven + streams, HIGHEST)
        self.rose_at = now
        self._failures = 0
        self._risen += streams
        if 0 < self._window <= self._risen:
            self._window, self._risen = min(2 * self._window, HIGHEST), 0.0
            self._pause_s = PAUSE_S

    def _stop(self, now: float, *, cuts: bool = False) -> None:
        """Stops the growth for a while. ``cuts``: also lowers the limit."""
        if cuts:
            self._proven, self._cut_at = CUT * self._proven, now
        self._window, self._stopped_at, self._failures = 0, now, 0
        self._grows_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _update(self) -> None:
        self.rising_s = 0.0 if self._window == 0 else inf if self._typical_s is None else _late_s(self._typical_s)
        self.value = min(max(int(self._proven) + self._room(), self._lowest), HIGHEST)

    def _room(self) -> int:
        """Returns how many streams may try now: the sooner first outputs come, the fewer."""
        if self._typical_s is None:
            return min(self._window, self._cold)
        growth = min((self._in_time_s / DOUBLING_S) ** 1.5, MOST_GROWTH)
        most = min(growth * self._proven, max(self._most_cold, self._proven))
        return min(self._window, max(self._fewest, int(most)))


def _late_s(usual_s: float) -> float:
    return max(IN_TIME_S, LATE * usual_s)


def average(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)
