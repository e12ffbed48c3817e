"""Detects faults that Triton does not report, from the results of the engine's calls.

``TritonHealth`` decides what the engine reports as live and ready. It combines the circuit breakers of the models
(``Breakers``) with the calls that do not return (``Progress``).
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable

from app.core.aio import Backoff
from app.core.engine import ObservedCall
from app.core.errors import DeadlineExceeded, GatewayError, ModelNotReady, Unavailable, UpstreamUnavailable
from app.core.inference import InferenceRequest, InferenceResponse
from app.triton.health.declarations import Declarations, NoDeclarations
from app.triton.health.python_backend import Stubs

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
    """The circuit breakers of one Triton, by model.

    After several consecutive failures at one Triton, a model is not called until a probe succeeds. Only failures
    without an answer count: UNAVAILABLE, and a deadline that passed after the model should have answered. An error of
    the model or of the caller is an answer.
    """

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

    def has_answered_since_opened(self, model: str) -> bool:
        """Whether the model answered a call, perhaps one from before the breaker of the model opened."""
        return self._failures[model] < FAILURES

    def close(self, model: str) -> None:
        """Closes the breaker of a model after a successful probe."""
        self._failures.pop(model, None)
        if self.open.pop(model, None) is not None:
            self._count_open(model, -1)
            _log.info("model '%s' answers again: its breaker is closed", model)
        if not self.open:
            self.opened.clear()

    def longest_wait_s(self, model: str) -> float:
        """Returns the model's longest recent answer time; 0 if it has not answered."""
        return self._waits_s.get(model, 0.0)

    def timeout_s(self, model: str) -> float:
        """Returns the time after which a missing answer of the model counts as a failure."""
        longest_s = self._waits_s.get(model)
        return UNKNOWN_TIMEOUT_S if longest_s is None else max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * longest_s)


SILENCE_S = 5.0
"""An abandoned call counts as unanswered if it waited at least this long for a response."""
_TOGETHER_S = 0.001
"""Responses of a call that arrive within this time count as one answer."""
_NO_ANSWER = {"DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE"}
"""Codes that gRPC generates without Triton. Triton uses UNAVAILABLE too, which then does not count as an answer."""


class Silence:
    """How long calls of one model have waited since its last answer. Calls at the same time count once."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._until = 0.0

    def add(self, began: float, ended: float) -> None:
        """Adds the wait of an unanswered call, in monotonic seconds."""
        self.waited_s += max(0.0, ended - max(began, self._until))
        self._until = ended


class Progress:
    """Tracks whether inference calls return. A stuck Triton is live, but does not answer inference calls.

    Counts consecutive calls without an answer. Reports the end of each call to ``breakers``.
    """

    def __init__(self, breakers: Breakers | None = None, declared: Declarations | None = None) -> None:
        self.breakers = breakers or Breakers()
        self._declared = declared or NoDeclarations()
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
        self._silences: dict[str, Silence] = {}
        """By model with unanswered calls since its last answer."""

    def started(self, request: InferenceRequest, method: str, timeout_s: float = math.inf) -> ObservedCall:
        """``timeout_s``: until the deadline of the call."""
        return _TimedCall(request, method, self, timeout_s)

    def answered(self, model: str, method: str, waited_s: float) -> None:
        self.unanswered[method] = 0
        self.answers[method] += 1
        self.heard_at = self._heard_at[model] = time.monotonic()
        if self._silences:
            self._end_silence(model)
        if waited_s >= self._longest_wait_s.get(model, 0.0):
            self._longest_wait_s[model] = waited_s
        self.breakers.answered(model, waited_s)

    def unanswered_since(self, model: str, method: str, began: float) -> None:
        """Counts a call that ends now without an answer. ``began``: when its wait began, in monotonic seconds."""
        self.unanswered[method] += 1
        self.unanswered_by_model[model] += 1
        self._silences.setdefault(model, Silence()).add(began, time.monotonic())

    def may_be_busy(self, model: str) -> bool:
        """Whether the silence of the model is explained by the declared time until a first output."""
        silence = self._silences.get(model)
        return silence is not None and silence.waited_s < self._declared.first_output_s(model)

    def _end_silence(self, model: str) -> None:
        self._silences.pop(model, None)
        self.unanswered_by_model.pop(model, None)

    def has_answered(self, model: str) -> bool:
        return model in self._longest_wait_s

    def has_answered_since(self, model: str, since: float) -> bool:
        """``since``: in monotonic seconds."""
        return self._heard_at.get(model, 0.0) >= since

    def timeout_s(self, model: str) -> float:
        """Returns the timeout of a canary of the model: three times its longest answer time so far, at least 5 s."""
        return max(SILENCE_S, 3 * self._longest_wait_s.get(model, 0.0))


class _TimedCall(ObservedCall):
    def __init__(self, request: InferenceRequest, method: str, progress: Progress, timeout_s: float) -> None:
        super().__init__(request)
        self._method = method
        self._progress = progress
        self._timeout_s = timeout_s
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
        model = self.request.model
        if self._is_unanswered(code):
            self._progress.unanswered_since(model, self._method, self._since)
        if error is None or self._has_response:
            return
        if not (isinstance(error, DeadlineExceeded) and self._progress.may_be_busy(model)):
            waited_s = min(time.monotonic() - self._since, self._timeout_s)  # a busy gateway notices a deadline late
            self._progress.breakers.failed(model, error, waited_s)

    def _is_unanswered(self, code: str) -> bool:
        if code == "DEADLINE_EXCEEDED" and not self._has_response:
            return True
        return code != "UNAVAILABLE" and time.monotonic() - self._since >= SILENCE_S

    def _answered(self, now: float) -> None:
        self._progress.answered(self.request.model, self._method, now - self._since)
        self._since = now


ENGINE_RETRY_S = 5
"""``Retry-After`` while the engine of a model is dead. An engine loads for longer, or somebody must load it."""


class TritonHealth:
    """Collects the results of the engine's calls, and decides what the engine reports as live and ready."""

    def __init__(
        self,
        stubs: Stubs | None = None,
        count_open: CountOpen = lambda model, change: None,
        declared: Declarations | None = None,
    ) -> None:
        self.stubs = stubs or Stubs()
        self.breakers = Breakers(count_open)
        self.progress = Progress(self.breakers, declared)
        self.hung_models: set[str] = set()
        """Models that do not answer although Triton is live."""
        self.restart_wanted_by: set[str] = set()
        """The hung models that only a restart of Triton can help."""

    @property
    def needs_restart(self) -> bool:
        return self.progress.is_stuck or bool(self.restart_wanted_by)

    def has_working(self, model: str) -> bool:
        """Whether no known fault concerns the model, or a model that it runs."""
        if not self.stubs.dead_models and not self.hung_models:
            return True
        return (self.stubs.dead_models | self.hung_models).isdisjoint(self.stubs.run_by(model))

    def refusal(self, model: str) -> Unavailable | None:
        """Returns the error if requests to the model must not be sent to this Triton now, else None."""
        if self.hung_models and not self.hung_models.isdisjoint(self.stubs.run_by(model)):
            return ModelNotReady(f"Model '{model}' does not answer.", was_sent=False)
        if self.breakers.open and (breaker := self.breakers.open.get(model)) is not None:
            text = f"Model '{model}' failed several times in a row; it is not called until it answers a probe."
            return UpstreamUnavailable(text, was_sent=False, retry_after_s=breaker.retry_after_s)
        if self.stubs.dead_engines and not self.stubs.has_engine(model):
            text = f"The engine of model '{model}' has died."
            return ModelNotReady(text, was_sent=False, retry_after_s=ENGINE_RETRY_S)
        if self.stubs.dead_models and not self.stubs.is_alive(model):
            return ModelNotReady(f"A process that model '{model}' needs has died.", was_sent=False)
        if self.progress.is_stuck:
            return UpstreamUnavailable("Triton is stuck: it answers no inference call.", was_sent=False)
        return None

    def fault(self, model: str) -> str:
        """Why a model that Triton reports as ready is not, as a clause for messages; empty without a known cause."""
        if not self.stubs.has_engine(model):
            return "its engine has died"
        return "" if self.stubs.is_alive(model) else "a process that it needs has died"


class HealthByAddress(dict[str, TritonHealth]):
    """The health of each Triton that the gateway currently calls."""

    @property
    def needs_restart(self) -> bool:
        """Whether every Triton is stuck, or has a model that answers only after a restart."""
        return bool(self) and all(health.needs_restart for health in self.values())
