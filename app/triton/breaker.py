"""Circuit breakers: after several consecutive failures at one Triton, a model is not called until a probe succeeds.

Only failures without an answer count: UNAVAILABLE, and a deadline that passed after the model should have answered.
An error of the model or of the caller is an answer.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable

from app.domain.backoff import Backoff
from app.domain.errors import DeadlineExceeded, GatewayError, UpstreamUnavailable

FAILURES = 5
"""The number of consecutive failures that opens a breaker."""
FIRST_PROBE_S = 0.25
LONGEST_PROBE_S = 5.0
"""Longest interval between probes of a model that does not answer. An unreachable model keeps the first interval."""
TIMEOUT_FACTOR = 3.0
"""A passed deadline counts as a failure after this many times the model's longest recent answer time."""
LEAST_TIMEOUT_S = 1.0
"""Lower limit of that time."""
UNKNOWN_TIMEOUT_S = 5.0
"""That time for a model that has never answered."""
_FADING = 0.99
_log = logging.getLogger(__name__)

CountOpen = Callable[[str, int], None]
"""Called with the model and 1 when a breaker opens, -1 when it closes."""


class Breaker:
    """An open breaker. ``is_reached``: whether requests reach the model but are not answered."""

    def __init__(self, *, is_reached: bool) -> None:
        self.is_reached = is_reached
        self._backoff = Backoff(FIRST_PROBE_S, LONGEST_PROBE_S if is_reached else FIRST_PROBE_S)
        self._backoff.fail()

    @property
    def is_due(self) -> bool:
        """Whether to send a probe now."""
        return self._backoff.is_due

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until the next probe is expected to be answered."""
        return max(1, math.ceil(self._backoff.due_at - time.monotonic()))

    def probe_failed(self) -> None:
        self._backoff.fail()


class Breakers:
    """The breakers of one Triton, by model."""

    def __init__(self, count_open: CountOpen = lambda model, change: None) -> None:
        self._count_open = count_open
        self.open: dict[str, Breaker] = {}
        self.opened = asyncio.Event()
        """Set while any breaker is open."""
        self._failures: Counter[str] = Counter()
        self._waits_s: dict[str, float] = {}

    def answered(self, model: str, waited_s: float) -> None:
        """Call this when Triton answered a call, with a response or an error."""
        faded_s = self._waits_s.get(model, 0.0) * _FADING
        self._waits_s[model] = waited_s if waited_s > faded_s else faded_s
        if self._failures:
            self._failures.pop(model, None)

    def failed(self, model: str, error: GatewayError, waited_s: float) -> None:
        """Call this when a call ended without an answer."""
        is_timeout = isinstance(error, DeadlineExceeded)
        is_lost = isinstance(error, UpstreamUnavailable) and not error.was_answered
        if not (is_lost or (is_timeout and waited_s >= self.timeout_s(model))):
            return
        self._failures[model] += 1
        if self._failures[model] >= FAILURES and model not in self.open:
            self.open[model] = Breaker(is_reached=is_timeout)
            self.opened.set()
            self._count_open(model, 1)
            _log.error("model '%s' failed %d times in a row without an answer: its breaker is open", model, FAILURES)

    def close(self, model: str) -> None:
        """Closes the breaker of a model after a successful probe."""
        self._failures.pop(model, None)
        if self.open.pop(model, None) is not None:
            self._count_open(model, -1)
            _log.info("model '%s' answers again: its breaker is closed", model)
        if not self.open:
            self.opened.clear()

    def timeout_s(self, model: str) -> float:
        """Returns the time after which a missing answer of the model counts as a failure."""
        longest_s = self._waits_s.get(model)
        return UNKNOWN_TIMEOUT_S if longest_s is None else max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * longest_s)
