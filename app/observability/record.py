"""What is known of one request while it runs, and the line and the numbers that stay of it."""

import logging
import re
import time
import uuid
from dataclasses import dataclass, field, replace

from app.domain.errors import ContractViolation, GatewayError, Outcome
from app.domain.fault import FaultKind
from app.domain.trace import TraceContext
from app.observability.metrics import NO_PIPELINE, Metrics

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_STREAM_ID = re.compile(r"(?<=/streams/)[^/]+")
"""Who has a stream's id may read and cancel the stream: it is not for the log."""

_log = logging.getLogger("triton_gateway.request")


def request_id_of(offered: str | None) -> str:
    """The caller's id if it is a harmless one, else a new one."""
    return offered if offered is not None and REQUEST_ID.fullmatch(offered) else uuid.uuid4().hex


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes along; ``transport`` is None for requests that are no inference."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    pipeline: str = NO_PIPELINE
    transport: str | None = None
    triton_request_id: str = ""
    triton_s: float = 0.0
    status: int = 0
    outcome: Outcome = Outcome.OK
    early_exit: str | None = None
    error: GatewayError | None = None
    trace: TraceContext | None = None
    """The request's own span, or the caller's where this gateway records none."""

    def fail(self, error: GatewayError) -> None:
        self.error, self.outcome = error, error.outcome

    def handed_over(self) -> "RequestRecord":
        """A record of its own for work that outlives this request, which then counts as no inference itself."""
        own = replace(self)
        self.transport = None
        return own

    def exit_early(self, reason: str | None) -> None:
        if reason is not None:
            self.early_exit, self.outcome = reason, Outcome.EARLY_EXIT

    @property
    def duration_s(self) -> float:
        return time.perf_counter() - self.started

    def server_timing(self) -> str:
        """Milliseconds so far, in the words of the Server-Timing header."""
        own_s = max(self.duration_s - self.triton_s, 0.0)
        return f"gateway;dur={own_s * 1e3:.2f}, triton;dur={self.triton_s * 1e3:.2f}"

    def close(self, metrics: Metrics) -> None:
        """Once, when nothing more will be sent."""
        duration_s = self.duration_s
        if self.transport is not None:
            self._count(metrics, self.transport, duration_s)
        _log.log(self._level(), "request", extra=self._line(duration_s))

    def _count(self, metrics: Metrics, transport: str, duration_s: float) -> None:
        metrics.of_pipeline(self.pipeline).count_request(transport, self.outcome, duration_s, self.triton_s)
        if self.early_exit is not None:
            metrics.early_exits.labels(self.pipeline, self.early_exit).inc()
        if self.outcome is Outcome.REJECTED and self.error is not None:
            metrics.rejected.labels(self.error.code).inc()
        if isinstance(self.error, ContractViolation):
            metrics.contract_violations.labels(self.pipeline, self.error.tensor).inc()
        if self.error is not None and self.error.fault is not None and self.error.fault.kind is FaultKind.RAISED:
            metrics.model_exceptions.labels(self.pipeline).inc()

    def _level(self) -> int:
        if self.outcome is Outcome.INTERNAL:
            return logging.ERROR
        return logging.INFO if self.transport is not None else logging.DEBUG

    def _line(self, duration_s: float) -> dict[str, object]:
        line: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": _STREAM_ID.sub("***", self.path),
            "status": self.status,
            "outcome": str(self.outcome),
            "duration_ms": round(duration_s * 1e3, 2),
        }
        if self.transport is not None:
            line |= {"pipeline": self.pipeline, "transport": self.transport, "triton_ms": round(self.triton_s * 1e3, 2)}
        if self.triton_request_id:
            line["triton_request_id"] = self.triton_request_id
        if self.early_exit is not None:
            line["early_exit"] = self.early_exit
        if self.trace is not None:
            line |= {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}
        return line | self._error_of_line()

    def _error_of_line(self) -> dict[str, object]:
        if self.error is None:
            return {}
        said: dict[str, object] = {"code": self.error.code, "detail": self.error.detail}
        if self.error.upstream is not None:
            said["triton_code"] = self.error.upstream.grpc_code
            said["triton_message"] = self.error.upstream.message[:1024]
        return said
