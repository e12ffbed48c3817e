"""Delays between retries."""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """The delay is ``first_s`` after the first failure, doubled with each further failure, at most ``longest_s``."""

    first_s: float = 1.0
    longest_s: float = 60.0
    failures: int = 0
    due_at: float = 0.0
    """Seconds on ``time.monotonic``."""

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.due_at

    def fail(self) -> float:
        """Returns the delay until the next attempt, in seconds."""
        delay_s = min(self.first_s * 2.0 ** min(self.failures, 16), self.longest_s)
        self.failures += 1
        self.due_at = time.monotonic() + delay_s
        return delay_s

    def reset(self) -> None:
        self.failures, self.due_at = 0, 0.0
