"""Tracks whether inference calls return. A stuck Triton is live, but does not answer inference calls."""

import time
from collections import Counter
from dataclasses import dataclass, field

from app.domain.calls import ObservedCall
from app.domain.errors import GatewayError
from app.domain.inference import InferenceRequest, InferenceResponse
from app.triton.breaker import Breakers

SILENCE_S = 5.0
"""An abandoned call counts as unanswered if it waited at least this long for a response."""
_TOGETHER_S = 0.001
"""Responses of a call that arrive within this time count as one answer."""
_NO_ANSWER = {"DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"}
"""Codes that gRPC generates without Triton. Triton uses UNAVAILABLE too, which then does not count as an answer."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One process's observations since its last report. ``unanswered``: calls since the last answer, by gRPC method."""

    unanswered: dict[str, int]
    answers: dict[str, int]
    longest_wait_s: dict[str, float]
    """By model that answered."""
    unanswered_by_model: dict[str, int] = field(default_factory=dict)


class Progress:
    """Observes calls and counts consecutive calls without an answer.

    Reports the end of each call to ``breakers``.
    """

    def __init__(self, breakers: Breakers | None = None) -> None:
        self.breakers = breakers or Breakers()
        self.heard_at = 0.0
        """When Triton last answered a call, in monotonic seconds."""
        self.is_stuck = False
        self.unanswered: Counter[str] = Counter()
        """gRPC method -> consecutive calls without an answer."""
        self.answers: Counter[str] = Counter()
        """gRPC method -> answers so far."""
        self.unanswered_by_model: Counter[str] = Counter()
        """Model -> consecutive calls without an answer."""
        self._longest_wait_s: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}

    def started(self, request: InferenceRequest, method: str) -> ObservedCall:
        return _TimedCall(request, method, self)

    def answered(self, model: str, method: str, waited_s: float) -> None:
        self.unanswered[method] = 0
        self.answers[method] += 1
        self.heard_at = self._heard_at[model] = time.monotonic()
        if self.unanswered_by_model:
            self.unanswered_by_model.pop(model, None)
        if waited_s >= self._longest_wait_s.get(model, 0.0):
            self._longest_wait_s[model] = waited_s
        self.breakers.answered(model, waited_s)

    def take(self) -> Seen:
        """Returns the observations since the last call, for the process that supervises Triton."""
        unanswered, by_model = dict(self.unanswered), dict(self.unanswered_by_model)
        seen = Seen(unanswered, dict(self.answers), self._longest_wait_s, by_model)
        self.unanswered, self.answers, self.unanswered_by_model = Counter(), Counter(), Counter()
        self._longest_wait_s = {}
        return seen

    def add(self, seen: Seen) -> None:
        """Adds the observations that :meth:`take` returned in another process."""
        for method, count in seen.answers.items():
            self.unanswered[method] = 0
            self.answers[method] += count
        self.unanswered.update(seen.unanswered)
        for model, wait_s in seen.longest_wait_s.items():
            self._longest_wait_s[model] = max(self._longest_wait_s.get(model, 0.0), wait_s)
            self.unanswered_by_model.pop(model, None)
            self._heard_at[model] = time.monotonic()
        self.unanswered_by_model.update(seen.unanswered_by_model)

    def has_answered(self, model: str) -> bool:
        return model in self._longest_wait_s

    def has_answered_since(self, model: str, since: float) -> bool:
        """``since``: in monotonic seconds."""
        return self._heard_at.get(model, 0.0) >= since

    def timeout_s(self, model: str) -> float:
        """Returns the timeout of a canary of the model: three times its longest answer time so far, at least 5 s."""
        return max(SILENCE_S, 3 * self._longest_wait_s.get(model, 0.0))


class _TimedCall(ObservedCall):
    def __init__(self, request: InferenceRequest, method: str, progress: Progress) -> None:
        super().__init__(request)
        self._method = method
        self._progress = progress
        self._since = time.monotonic()
        self._has_response = False

    def response(self, response: InferenceResponse) -> None:
        now = time.monotonic()
        if not self._has_response or now - self._since >= _TOGETHER_S:
            self._has_response = True
            self._answered(now)

    def ended(self, code: str, error: GatewayError | None) -> None:
        if self._has_response and code == "OK":
            return  # the last response was counted when it arrived
        if code not in _NO_ANSWER:
            self._answered(time.monotonic())
            return
        if self._is_unanswered(code):
            self._progress.unanswered[self._method] += 1
            self._progress.unanswered_by_model[self.request.model] += 1
        if error is not None and not self._has_response:
            self._progress.breakers.failed(self.request.model, error, time.monotonic() - self._since)

    def _is_unanswered(self, code: str) -> bool:
        if code == "DEADLINE_EXCEEDED" and not self._has_response:
            return True
        return code != "UNAVAILABLE" and time.monotonic() - self._since >= SILENCE_S

    def _answered(self, now: float) -> None:
        self._progress.answered(self.request.model, self._method, now - self._since)
        self._since = now
