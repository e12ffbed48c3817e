"""Spans for requests, streams and calls to Triton. Without a collector there are no spans.

Opens the tracer of the settings. Imports the OpenTelemetry SDK only if a collector is set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec.structs import replace

from app.core.engine import ObservedCall
from app.core.errors import GatewayError, Outcome
from app.core.inference import InferenceRequest
from app.observability.record import RequestRecord

if TYPE_CHECKING:
    from app.observability.otlp import OtlpSpan, OtlpTracer

Attributes = Mapping[str, str | int]
SpanKind = Literal["SERVER", "INTERNAL", "CLIENT"]
Tracer: TypeAlias = "OtlpTracer | None"
"""None without a collector."""

_FAULTS = {
    Outcome.MODEL_ERROR,
    Outcome.CONTRACT_VIOLATION,
    Outcome.TIMEOUT,
    Outcome.UNAVAILABLE,
    Outcome.INTERNAL,
}
"""Outcomes that mark a span as an error. Client errors do not (OpenTelemetry: HTTP server spans)."""


def end_request_span(span: "OtlpSpan", record: RequestRecord, route: str | None) -> None:
    """``route``: the template of the path, or None if no route matched."""
    attributes: dict[str, str | int] = {
        "http.request.method": record.method,
        "triton_gateway.request_id": record.request_id,
    }
    if record.status:
        attributes["http.response.status_code"] = record.status
    if record.transport is not None:
        attributes |= {"triton_gateway.pipeline": record.pipeline, "triton_gateway.transport": record.transport}
    if record.triton_request_id:
        attributes["triton_gateway.triton_request_id"] = record.triton_request_id
    if (sent_as := record.sent_as) is not None:
        attributes |= {f"triton_gateway.{name}": value for name, value in sent_as.notes.items()}
        if sent_as.trace is not None and sent_as.trace != record.trace:
            span.link(sent_as.trace)
    if record.operation or record.tokens is not None:
        # docs/gen-ai/gen-ai-spans.md of open-telemetry/semantic-conventions at commit 01d9450
        attributes |= {
            "gen_ai.operation.name": record.operation or "generate_content",
            "gen_ai.provider.name": "triton",
            "gen_ai.request.model": record.pipeline,
        }
    if record.tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = record.tokens.completion
        if record.tokens.prompt is not None:
            attributes["gen_ai.usage.input_tokens"] = record.tokens.prompt
    if route is not None:
        attributes["http.route"] = route
    name = record.method if route is None else f"{record.method} {route}"
    outcome, fault = _outcome_of(record.outcome, record.error, record.early_exit)
    span.end(attributes | outcome, name=name, error=fault)


def end_stream_span(
    span: "OtlpSpan", *, outputs: int, outcome: Outcome | None, error: GatewayError | None, early_exit: str | None
) -> None:
    """Called with the stream's terminal event."""
    attributes, fault = _outcome_of(outcome or Outcome.OK, error, early_exit)
    span.end({"triton_gateway.outputs": outputs} | attributes, error=fault)


def _outcome_of(
    outcome: Outcome, error: GatewayError | None, early_exit: str | None
) -> tuple[dict[str, str | int], str | None]:
    """Returns the attributes, and the code of an error that marks the span as failed."""
    attributes: dict[str, str | int] = {"triton_gateway.outcome": str(outcome)}
    if error is not None:
        attributes["error.type"] = error.code
    if early_exit is not None:
        attributes["triton_gateway.early_exit"] = early_exit
    return attributes, error.code if error is not None and outcome in _FAULTS else None


def traced_call(tracer: "OtlpTracer", request: InferenceRequest, method: str) -> ObservedCall:
    """Opens a span for a call. Triton's own spans are children of that span.

    The gateway's internal requests, such as a warm-up, have no trace and get no span.
    """
    if request.trace is None:
        return ObservedCall(request, method)
    span = tracer.start(f"{method} {request.model}", "CLIENT", request.trace)
    return _TracedCall(replace(request, trace=span.trace), method, span)


@dataclass(eq=False)
class _TracedCall(ObservedCall):
    span: "OtlpSpan"

    def ended(self, code: str, error: GatewayError | None) -> None:
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": f"inference.GRPCInferenceService/{self.method}",
            "rpc.response.status_code": code,
            "triton.model_name": self.request.model,
            "triton.request_id": self.request.request_id,
        }
        if step := self.request.request_id.partition(".")[2].rpartition(".")[0]:
            attributes["triton_gateway.step"] = step
        self.span.end(attributes, error=code if error else None)


def tracer_of(url: str | None, version: str) -> Tracer:
    """``url``: the collector's address for traces; None: no spans. Close the tracer at the end."""
    if url is None:
        return None
    from app.observability.otlp import OtlpTracer  # noqa: PLC0415 - costs memory, and is an extra

    return OtlpTracer(url, version)
