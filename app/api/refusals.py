"""Bounds what refused requests cost: callers that ask again at once would otherwise take the CPU from the models."""

import asyncio
from time import monotonic

REFUSALS_PER_S = 1000
"""Refusals that are answered in a second. Each takes about 0.2 ms of CPU."""
LONGEST_DELAY_S = 1.0


class Pace:
    """Spreads answers over time. Answers at a lower rate are not delayed."""

    def __init__(self, rate: float = REFUSALS_PER_S, burst: int = REFUSALS_PER_S // 10) -> None:
        """``burst``: answers that may come together."""
        self._interval_s = 1 / rate
        self._burst_s = burst / rate
        self._next_at = 0.0

    def delay_s(self, now: float) -> float:
        """How long the next answer is to be delayed. Each call is one answer."""
        self._next_at = max(self._next_at, now - self._burst_s) + self._interval_s
        delay_s = self._next_at - now
        if delay_s > LONGEST_DELAY_S:
            self._next_at = now + LONGEST_DELAY_S
        return min(max(delay_s, 0.0), LONGEST_DELAY_S)


_refusals = Pace()
"""The refusals of this process."""


async def delay_refusal() -> None:
    """Returns at once unless there are too many refusals. The connection is not read meanwhile."""
    delay_s = _refusals.delay_s(monotonic())
    if delay_s > 0:
        await asyncio.sleep(delay_s)
