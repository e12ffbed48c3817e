"""Breakers: a model that failed several times in a row at one Triton is not called there until a probe succeeds.

Only failures without any answer count: UNAVAILABLE, and a deadline that passed after a wait in which the model would
have answered. An error of the model or of the caller is an answer.
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
"""So many failures in a row open a breaker."""
FIRST_PROBE_S = 0.25
LONGEST_PROBE_S = 5.0
"""Between two probes of a model that does not answer. One that cannot be reached is probed at the first interval."""
PATIENCE = 3.0
"""A deadline counts after so many times the longest wait that the model needed recently,"""
LEAST_PATIENCE_S = 1.0
"""and after at least this long,"""
UNKNOWN_PATIENCE_S = 5.0
"""or after this long, if the model was never answered."""
_FADING = 0.99
_log = logging.getLogger(__name__)

CountOpen = Callable[[str, int], None]
"""Is told of a model's breaker that opens (1) or closes (-1)."""


class Breaker:
    """Open. ``is_reached``: whether requests reach the model, and it does not answer them."""

    def __init__(self, *, is_reached: bool) -> None:
        self.is_reached = is_reached
        self._backoff = Backoff(FIRST_PROBE_S, LONGEST_PROBE_S if is_reached else FIRST_PROBE_S)
        self._backoff.fail()

    @property
    def is_due(self) -> bool:
        """Whether a probe is to be sent now."""
        return self._backoff.is_due

    @property
    def retry_after_s(self) -> int:
        """Until the next probe has been answered, in whole seconds."""
        return max(1, math.ceil(self._backoff.due_at - time.monotonic()))

    def probe_failed(self) -> None:
        self._backoff.fail()


class Breakers:
    """By model, of one Triton."""

    def __init__(self, count_open: CountOpen = lambda model, change: None) -> None:
        self._count_open = count_open
        self.open: dict[str, Breaker] = {}
        self.opened = asyncio.Event()
        """Set while a breaker is open."""
        self._failures: Counter[str] = Counter()
        self._waits_s: dict[str, float] = {}

    def answered(self, model: str, waited_s: float) -> None:
        """Triton answered a call, with a response or with an error."""
        faded_s = self._waits_s.get(model, 0.0) * _FADING
        self._waits_s[model] = waited_s if waited_s > faded_s else faded_s
        if self._failures:
            self._failures.pop(model, None)

    def failed(self, model: str, error: GatewayError, waited_s: float) -> None:
        """A call ended without an answer."""
        is_timeout = isinstance(error, DeadlineExceeded)
        is_lost = isinstance(error, UpstreamUnavailable) and not error.was_answered
        if not (is_lost or (is_timeout and waited_s >= self.patience_s(model))):
            return
        self._failures[model] += 1
        if self._failures[model] >= FAILURES and model not in self.open:
            self.open[model] = Breaker(is_reached=is_timeout)
            self.opened.set()
            self._count_open(model, 1)
            _log.error("model '%s' failed %d times in a row without an answer: its breaker is open", model, FAILURES)

    def close(self, model: str) -> None:
        """A probe of the model succeeded."""
        self._failures.pop(model, None)
        if self.open.pop(model, None) is not None:
            self._count_open(model, -1)
            _log.info("model '%s' answers again: its breaker is closed", model)
        if not self.open:
            self.opened.clear()

    def patience_s(self, model: str) -> float:
        """How long an answer of the model may take before its absence counts as a failure."""
        longest_s = self._waits_s.get(model)
        return UNKNOWN_PATIENCE_S if longest_s is None else max(LEAST_PATIENCE_S, PATIENCE * longest_s)
