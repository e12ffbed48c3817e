"""Sends spans to an OpenTelemetry collector with OTLP over HTTP. Imported only if tracing is on."""

import asyncio
import threading

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from app.core.inference import TraceContext
from app.observability.tracing import Attributes, SpanKind

SERVICE_NAME = "triton-gateway"
CLOSE_S = 3.0
"""Time limit for the remaining spans, so that a collector cannot delay the end of the process."""


class OtlpTracer:
    """Sends spans in the background, in batches, and drops spans that the collector does not accept.

    OpenTelemetry's own ``OTEL_*`` variables set the sampling, the batches and the resource. By default the caller's
    ``traceparent`` decides the sampling; a request without ``traceparent`` is sampled.
    """

    def __init__(self, url: str, version: str) -> None:
        """``url``: the collector's address for traces, path included."""
        self._provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("triton_gateway", version)

    def start(self, name: str, kind: SpanKind, parent: TraceContext | None) -> "OtlpSpan":
        context = Context()  # not that of the running task: without a parent, the span begins a trace
        if parent is not None:
            context = api.set_span_in_context(api.NonRecordingSpan(_span_context_of(parent)), context)
        return OtlpSpan(self._tracer.start_span(name, context, api.SpanKind[kind]))

    async def close(self) -> None:
        """Sends the remaining spans; returns after a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


class OtlpSpan:
    """``trace``: the parent of its children."""

    def __init__(self, span: api.Span) -> None:
        own = span.get_span_context()
        ids = api.format_trace_id(own.trace_id), api.format_span_id(own.span_id)
        self.trace = TraceContext(*ids, own.trace_flags, own.trace_state.to_header())
        self._span = span

    def link(self, other: TraceContext) -> None:
        """Links the span to a span of another trace. Call it before :meth:`end`."""
        self._span.add_link(_span_context_of(other))

    def end(self, attributes: Attributes, *, name: str | None = None, error: str | None = None) -> None:
        """``error``: an error code, which marks the span as failed. ``name`` replaces the span's first name."""
        self._span.set_attributes(attributes)
        if name is not None:
            self._span.update_name(name)
        if error is not None:
            self._span.set_status(api.StatusCode.ERROR, error)
        self._span.end()


def _resource(version: str) -> Resource:
    """``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` override the name; the SDK's placeholder does not."""
    named = Resource.create()
    if str(named.attributes["service.name"]).startswith("unknown_service"):
        named = named.merge(Resource({"service.name": SERVICE_NAME}))
    return named.merge(Resource({"service.version": version}))


def _span_context_of(trace: TraceContext) -> api.SpanContext:
    return api.SpanContext(
        int(trace.trace_id, 16),
        int(trace.span_id, 16),
        is_remote=True,
        trace_flags=api.TraceFlags(trace.flags),
        trace_state=api.TraceState.from_header([trace.state] if trace.state else []),
    )
