"""The entry point of each port: creates a request's record, its span and the headers of its answer."""

from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.budget import ByteBudget
from app.api.exchange import Exchange
from app.api.workload import Workload
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.observability.tracing import Kind, NoTracer, Span, Tracer, end_request_span


class EntryPoint:
    """The outermost ASGI application of a port. ``scope["state"]["exchange"]`` is the request's :class:`Exchange`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, workload: Workload, tracer: Tracer, budget: ByteBudget) -> None:
        self._app = app
        self._metrics = metrics
        self._workload = workload
        self._tracer = None if isinstance(tracer, NoTracer) else tracer
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._budget)
        scope["state"]["exchange"] = exchange
        span = self._span_of(exchange.record)
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            if span is not None:
                end_request_span(span, exchange.record, getattr(scope.get("route"), "path", None))
            exchange.record.count(self._metrics)
            if exchange.connection is None:
                self._close(exchange)
            else:
                exchange.connection.after_writing(partial(self._close, exchange))

    def _close(self, exchange: Exchange) -> None:
        self._workload.remove(exchange.work)
        exchange.close()
        exchange.record.log()

    def _span_of(self, record: RequestRecord) -> Span | None:
        """Only POST requests get a span, because every inference is a POST."""
        if self._tracer is None or record.method != "POST":
            return None
        span = self._tracer.start("POST", Kind.SERVER, record.trace)
        record.trace = span.trace
        return span
