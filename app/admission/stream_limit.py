"""The adaptive limit on the concurrent streams of a decoupled model (decision 9). Pure: no I/O, no clock."""

from collections.abc import Hashable
from math import ceil, inf
from typing import NamedTuple

from app.admission.limit import HIGHEST, Limit
from app.core.errors import TooManyRequests
from app.core.model import Capacity

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


class _Start(NamedTuple):
    at: float
    running: int
    """How many streams ran then, including this one."""


class _Outputs:
    """When a stream produced its outputs."""

    __slots__ = ("first_at", "gaps", "last_at")

    def __init__(self, now: float) -> None:
        self.first_at = self.last_at = now
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

    def __init__(self, capacity: Capacity, processes: int = 1) -> None:
        self._lowest = ceil(capacity.instances / processes) + 1
        self._fewest = ceil(STREAMS / processes)
        self._most_cold = ceil(COLD_STREAMS / processes)
        self._proven = float(max(ceil(capacity.requests / processes) - self._fewest, 0))
        """The most streams that produced outputs at the same time. With the window it starts as configured."""
        self._window = HIGHEST
        """How many more streams may try. After a late first output 0, then 1; it doubles if there was room for them."""
        self._cold = self._fewest
        """As ``_window``, before the first output of any stream."""
        self._risen = 0.0
        """How much ``_proven`` has risen since the window changed."""
        self._failures = 0
        """How many streams tried since ``_proven`` has risen, and did not raise it."""
        self._pending: dict[Hashable, _Start] = {}
        """The streams without an output, oldest first."""
        self._producing: dict[Hashable, _Outputs] = {}
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
        self._pending[request] = _Start(now, len(self._pending) + len(self._producing) + 1)

    def output(self, request: Hashable, now: float) -> None:
        outputs = self._producing.get(request)
        if outputs is not None:
            outputs.last_at = now
            outputs.gaps += 1
            return
        start = self._pending.pop(request, None)
        if start is None:  # it started under the limit of an earlier configuration
            return
        self._producing[request] = _Outputs(now)
        self._check_wait(start, now)
        wait_s = now - start.at
        if wait_s <= _late_s(self._quickest_s):
            self._in_time_s = wait_s if self._typical_s is None else _average(self._in_time_s, wait_s)
        self._newest_start = max(self._newest_start, start.at)
        self._quickest_s = min(wait_s, 1.01 * self._quickest_s)
        self._typical_s = _average(self._typical_s, wait_s)
        if start.at > self._cut_at:
            self._learn_level(start, now)
        self._update()

    def ended(self, request: Hashable, now: float, error: BaseException | None, *, is_full: bool) -> None:
        outputs = self._producing.pop(request, None)
        if outputs is not None:
            self._producing_s = _average(self._producing_s, now - outputs.first_at)
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
            waited_s = now - next(iter(self._pending.values())).at
            doublings = int((waited_s - COLD_S) / COLD_DOUBLING_S) + 1 if waited_s >= COLD_S else 0
            if doublings:
                self._cold = min(self._fewest * 2**doublings, self._most_cold)
            wait_s = COLD_S + doublings * COLD_DOUBLING_S - waited_s
        self._update()
        return wait_s

    def _learn_level(self, start: _Start, now: float) -> None:
        """Raises ``_proven`` if more streams than before produce outputs now, none of them slowly.

        Brief streams, such as those with one output, hardly ever produce outputs at the same time. Then those count
        that ran at the start, unless the first output is late.
        """
        if self._producing_s is not None and self._producing_s < BRIEF_S:
            if start.running > self._proven and now - start.at <= _late_s(self._quickest_s):
                self._rise(now, 0.25)
        elif len(self._producing) > self._proven:
            if sum(not each.is_slow(now) for each in self._producing.values()) > self._proven:
                self._rise(now, 1.0)
        elif start.running > self._proven and now - start.at > 2 * self._quickest_s:
            # Its first output came only because other streams ended.
            self._failures += 1
            if self._window and self._failures >= max(min(self._room(), self._fewest), FAILURES):
                self._stop(now)

    def _check_wait(self, start: _Start, now: float) -> None:
        """Stops the growth if a stream waits too long for its first output, and lowers a limit that does not grow.

        A stream that others overtook has a large input: a full model would have started the others later.
        """
        wait_s = now - start.at
        if self._typical_s is None or start.at < self._newest_start or start.at <= self._stopped_at:
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


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)
