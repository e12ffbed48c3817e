"""An OpenTelemetry collector (OTLP over HTTP: protobuf of the gateway, JSON of Triton), and exports like Triton's."""

import json
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.toolkit.http_server import answering

WAIT_S = 60.0
_HEX_IDS = ("traceId", "spanId", "parentSpanId")


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    links: tuple[str, ...] = ()
    """The ids of the spans that it links to."""


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    requests: int = 0

    def of(self, trace_id: str, *names: str, count: int = 0, wait_s: float = WAIT_S) -> list[Span]:
        """Returns the trace's spans when the expected names and number have arrived, or all spans after a timeout."""
        ends = time.monotonic() + wait_s
        while time.monotonic() < ends:
            found = [span for span in self.spans if span.trace_id == trace_id]
            if len(found) >= count and set(names) <= {span.name for span in found}:
                break
            time.sleep(0.02)
        return found

    def take(self, body: bytes, content_type: str) -> bytes:
        """The answer, empty in both encodings."""
        self.requests += 1
        if "json" in content_type:
            # OTLP's JSON has its ids in hexadecimal, where protobuf's own has base64.
            request = json.loads(body)
            spans = [
                span for each in request["resourceSpans"] for scope in each["scopeSpans"] for span in scope["spans"]
            ]
            for span in spans:
                span |= {name: b64encode(bytes.fromhex(span[name])).decode() for name in _HEX_IDS if name in span}
            self.spans += spans_of(json_format.ParseDict(request, ExportTraceServiceRequest()))
            return b"{}"
        self.spans += spans_of(ExportTraceServiceRequest.FromString(body))
        return ExportTraceServiceResponse().SerializeToString()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
        assert request.path == "/v1/traces"
        media_type = request.headers["Content-Type"]
        return 200, media_type, collector.take(body, media_type)

    with answering(answer) as port:
        collector.url = f"http://127.0.0.1:{port}"
        yield collector


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    _attributes(span.attributes),
                    tuple(link.span_id.hex() for link in span.links),
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


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
