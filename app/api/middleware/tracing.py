"""Reads the caller's trace context, and opens a span for each request that can be an inference."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.observability.record import RequestRecord
from app.observability.tracing import Kind, Tracer, end_request_span, trace_of


class TracingMiddleware:
    """Must run inside RecordingMiddleware. Only POST requests get a span: every inference is a POST."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, record = Headers(scope=scope), scope["state"]["record"]
        record.trace = trace_of(headers.getlist("traceparent"), headers.getlist("tracestate"))
        if scope["method"] == "POST":
            await self._traced(record, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _traced(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        span = self.tracer.start("POST", Kind.SERVER, record.trace)
        record.trace = span.trace
        try:
            await self.app(scope, receive, send)
        finally:
            end_request_span(span, record, getattr(scope.get("route"), "path", None))
