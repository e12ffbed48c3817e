"""When to retry what failed."""

import time
from dataclasses import dataclass

FIRST_S = 1.0
LONGEST_S = 60.0


@dataclass(slots=True)
class Backoff:
    """The delay is ``FIRST_S`` after the first failure, doubled with each further one, at most ``LONGEST_S``."""

    failures: int = 0
    _due_at: float = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    @property
    def delay_s(self) -> float:
        return min(FIRST_S * 2.0 ** min(self.failures - 1, 16), LONGEST_S) if self.failures else 0.0

    def fail(self) -> None:
        self.failures += 1
        self._due_at = time.monotonic() + self.delay_s

    def reset(self) -> None:
        self.failures, self._due_at = 0, 0.0
