"""The record of one request: its state while it runs, then its log line and its metrics."""

import logging
import re
import time
from collections.abc import Callable

from msgspec import Struct, field

from app.core.answer import Tokens
from app.core.errors import ContractViolation, FaultKind, GatewayError, Outcome
from app.core.inference import SentAs, StepTimes, TraceContext, new_request_id
from app.observability.log import StructuredLogger
from app.observability.metrics import NO_PIPELINE, Metrics

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_BEARER_IDS: dict[str, re.Pattern[str]] = {}
"""What comes before an id that is a bearer capability -> the id. Never log it."""


def hide_ids_after(start: str) -> None:
    """``start``: the part of a path before an id that must not be logged."""
    _BEARER_IDS[start] = re.compile(f"(?<={re.escape(start)})[^/]+")


hide_ids_after("/streams/")

_LEVELS = dict.fromkeys(Outcome, logging.INFO)
"""The level of a request by its outcome, for streams too, although the status of a failed one is 200."""
_LEVELS |= dict.fromkeys(
    (Outcome.MODEL_ERROR, Outcome.CONTRACT_VIOLATION, Outcome.TIMEOUT, Outcome.UNAVAILABLE), logging.WARNING
)
_LEVELS[Outcome.INTERNAL] = logging.ERROR

_log = StructuredLogger("triton_gateway.request")


def request_id_of(offered: str | None) -> str:
    """Returns the caller's id if it is valid, otherwise a new id."""
    return offered if offered is not None and REQUEST_ID.fullmatch(offered) else new_request_id()


class RequestRecord(Struct, eq=False):
    """Filled while the request runs. ``transport`` is None for requests that do not run inference."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    pipeline: str = NO_PIPELINE
    transport: str | None = None
    key: str = ""
    """The id of the caller's API key."""
    triton_request_id: str = ""
    triton_at: float = 0.0
    """When the gateway called Triton, on the clock of ``started``; 0 before."""
    triton_s: float = 0.0
    """Time that the request waited for Triton."""
    stream_ended: float = 0.0
    """When the request's stream ended, on the clock of ``started``."""
    sent_as: SentAs | None = None
    """Set if the request had no call to Triton of its own."""
    steps: StepTimes | None = None
    """Set if the gateway runs the steps of the pipeline."""
    queue_s: float = 0.0
    total_s: float = 0.0
    """Time from the start to the end; 0 before."""
    status: int = 0
    outcome: Outcome = Outcome.OK
    early_exit: str | None = None
    error: GatewayError | None = None
    operation: str = ""
    """What a language model does, as OpenTelemetry names it; empty for other models."""
    tokens: Tokens | None = None
    """The tokens of a language model; None if nothing counts them."""
    trace: TraceContext | None = None
    """The request's span, or the caller's span if this gateway records none."""
    on_end: "Callable[[RequestRecord], None] | None" = None
    """Is called once, when the totals are known. Then the Server-Timing header has more parts."""

    def fail(self, error: GatewayError) -> None:
        """Replaces an earlier error, whose frames would only be freed by a garbage collection."""
        if self.error is not None and self.error is not error:
            self.error.forget_frames()
        self.error, self.outcome = error, error.outcome

    def add_tokens(self, tokens: Tokens) -> None:
        self.tokens = tokens if self.tokens is None else self.tokens + tokens

    def exit_early(self, reason: str | None) -> None:
        if reason is not None:
            self.early_exit, self.outcome = reason, Outcome.EARLY_EXIT

    @property
    def duration_s(self) -> float:
        return time.perf_counter() - self.started

    def server_timing(self) -> str:
        """The value of the Server-Timing header: milliseconds so far."""
        duration_s, queue_s = time.perf_counter() - self.started, self.queue_s
        triton_s = self.triton_s or (self.started + duration_s - self.triton_at if self.triton_at else 0.0)
        own_s = max(duration_s - queue_s - triton_s, 0.0)
        timing = f"gateway;dur={own_s * 1e3:.2f}, queue;dur={queue_s * 1e3:.2f}, triton;dur={triton_s * 1e3:.2f}"
        timing = f"{timing}{self.steps or ''}"
        if self.on_end is None:
            return timing
        phases = self.phases_ms(duration_s)
        return f"{timing}, read;dur={phases['read']:.2f}, respond;dur={phases.get('respond', 0.0):.2f}"

    def phases_ms(self, total_s: float) -> dict[str, float]:
        """The phases until ``total_s``, in order. They add up to it. On a stream Triton's has the rest."""
        queue_s, triton_s = self.queue_s, self.triton_s
        read_s = (self.triton_at - self.started if self.triton_at else total_s) - queue_s
        phases = {"read": read_s, "queue": queue_s}
        if self.triton_at:
            if not triton_s or self.stream_ended:
                triton_s = (self.stream_ended or self.started + total_s) - self.triton_at
            phases |= {"triton": triton_s, "respond": total_s - read_s - queue_s - triton_s}
        return {name: round(max(seconds, 0.0) * 1e3, 3) for name, seconds in phases.items()}

    def close(self, metrics: Metrics) -> None:
        """Counts and logs the request. Call it once, at its end."""
        self.count(metrics)
        self.log()

    def count(self, metrics: Metrics) -> None:
        """Counts the request, before its answer is written: so a process that is killed has counted every answer."""
        self.total_s = time.perf_counter() - self.started
        if self.on_end is not None:
            self.on_end(self)
        if self.transport is None:
            return
        pipeline = metrics.of_pipeline(self.pipeline)
        pipeline.requests(self.transport, self.outcome).inc()
        pipeline.request_duration(self.transport, self.outcome).observe(self.total_s)
        pipeline.overhead(self.transport).observe(max(self.total_s - self.queue_s - self.triton_s, 0.0))
        if self.tokens is not None:
            metrics.prompt_tokens.labels(self.pipeline).inc(self.tokens.prompt or 0)
            metrics.completion_tokens.labels(self.pipeline).inc(self.tokens.completion)
        if self.early_exit is not None:
            metrics.early_exits.labels(self.pipeline, self.early_exit).inc()
        if (error := self.error) is None:
            return
        if self.outcome is Outcome.REJECTED:
            metrics.rejected.labels(error.code).inc()
        if isinstance(error, ContractViolation):
            metrics.contract_violations.labels(self.pipeline, error.tensor).inc()
        if error.fault is not None and error.fault.kind is FaultKind.RAISED:
            metrics.model_exceptions.labels(self.pipeline).inc()

    def log(self) -> None:
        """Logs the request after :meth:`count`."""
        level = _LEVELS[self.outcome]
        if self.transport is None and level < logging.ERROR:
            level = logging.DEBUG
        elif self.status >= 500:
            level = max(level, logging.WARNING)
        if _log.is_enabled_for(level):
            _log.log(level, "request", self._fields())

    def _fields(self) -> dict[str, object]:
        path = self.path
        for start, ids in _BEARER_IDS.items():
            if start in path:  # ten times as fast as the search of the pattern
                path = ids.sub("***", path)
        # a time is rounded to two decimals, three times as fast as with round(..., 2)
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": path,
            "status": self.status,
            "outcome": str(self.outcome),
            "duration_ms": round(self.total_s * 1e5) / 100,
        }
        if self.transport is not None:
            fields["pipeline"] = self.pipeline
            fields["transport"] = self.transport
            fields["queue_ms"] = round(self.queue_s * 1e5) / 100
            fields["triton_ms"] = round(self.triton_s * 1e5) / 100
        if self.key:
            fields["key"] = self.key
        if self.triton_request_id:
            fields["triton_request_id"] = self.triton_request_id
        if self.sent_as is not None:
            fields |= self.sent_as.notes
        if self.tokens is not None:
            fields["prompt_tokens"] = self.tokens.prompt
            fields["completion_tokens"] = self.tokens.completion
        if self.early_exit is not None:
            fields["early_exit"] = self.early_exit
        if self.trace is not None:
            fields["trace_id"] = self.trace.trace_id
            fields["span_id"] = self.trace.span_id
        if (error := self.error) is not None:
            fields |= {"code": error.code, "detail": error.detail}
            if error.upstream is not None:
                fields["triton_code"] = error.upstream.grpc_code
                fields["triton_message"] = error.upstream.message[:1024]
        return fields
