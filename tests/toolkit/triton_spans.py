"""Exports of spans as Triton 2.51 sends them: OTLP/JSON, integers as strings, times of phases as events."""

import json
from dataclasses import dataclass, field
from typing import Any

COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


@dataclass
class Export:
    """Spans of one trace. Times are in milliseconds after ``started_ns``."""

    trace_id: str
    request_id: str
    started_ns: int
    spans: list[dict[str, Any]] = field(default_factory=list)

    def call(self, start_ms: float, end_ms: float, answered_ms: float) -> str:
        return self._add("InferRequest", "", (start_ms, end_ms), {"INFER_RESPONSE_COMPLETE": answered_ms})

    def run(self, model: str, parent: str, start_ms: float, end_ms: float, *compute_ms: float, name: str = "") -> str:
        """``compute_ms``: the four times of the phases; none for an ensemble. ``name``: replaces the request's id."""
        span_id = self._add(model, parent, (start_ms, end_ms), {"QUEUE_START": start_ms})
        self.spans[-1]["attributes"] = [
            {"key": "triton.model_name", "value": {"stringValue": model}},
            {"key": "triton.model_version", "value": {"intValue": "1"}},
            {"key": "triton.request_id", "value": {"stringValue": name or self.request_id}},
        ]
        if compute_ms:
            self._add("compute", span_id, (compute_ms[0], compute_ms[3]), dict(zip(COMPUTE, compute_ms, strict=True)))
        return span_id

    def body(self) -> bytes:
        scope = {"scope": {"name": "triton-server"}, "spans": self.spans}
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "triton-inference-server"}}]}
        return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}).encode()

    def _add(self, name: str, parent: str, window_ms: tuple[float, float], events: dict[str, float]) -> str:
        """Without attributes."""
        span_id = f"{len(self.spans) + 1:016x}"
        self.spans.append(
            {
                "traceId": self.trace_id,
                "spanId": span_id,
                "parentSpanId": parent or "f" * 16,
                "name": name,
                "kind": 2,
                "startTimeUnixNano": self._ns(window_ms[0]),
                "endTimeUnixNano": self._ns(window_ms[1]),
                "events": [{"name": event, "timeUnixNano": self._ns(at_ms)} for event, at_ms in events.items()],
            }
        )
        return span_id

    def _ns(self, at_ms: float) -> str:
        return str(self.started_ns + round(at_ms * 1e6))
