"""Rate-limits cancellations, because Triton 2.51 crashes under bursts."""

import asyncio
import time

from app.triton.transport import Call

CANCELS_PER_S = 200.0
BURST = 50
"""docs/decisions/0030-when-a-cancellation-is-sent.md has the measurement behind both values."""


class PacedCancels:
    """A leaky bucket: cancellations within the rate are sent at once, further cancellations wait."""

    def __init__(self, per_s: float = CANCELS_PER_S, burst: float = BURST) -> None:
        self._interval_s = 1.0 / per_s
        self._slack_s = burst * self._interval_s
        self._next = 0.0

    @classmethod
    def shared_by(cls, processes: int) -> "PacedCancels":
        """Returns the share of one of several processes that call the same Triton."""
        return cls(CANCELS_PER_S / processes, BURST / processes)

    def cancel(self, call: Call) -> None:
        """Cancels a call when its turn has come. A no-op for a call that is done."""
        if call.done():
            return
        wait_s = self.turn() - time.monotonic()
        if wait_s <= 0:
            call.cancel()
        else:
            asyncio.get_running_loop().call_later(wait_s, call.cancel)

    def turn(self) -> float:
        """Reserves the time of the next cancellation, in monotonic seconds."""
        self._next = max(self._next, time.monotonic() - self._slack_s) + self._interval_s
        return self._next
