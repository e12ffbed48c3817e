"""The way into each port: one place makes a request's record, its span and the headers of its answer."""

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.budget import ByteBudget
from app.api.exchange import Exchange
from app.api.workload import Workload
from app.observability.metrics import Metrics
from app.observability.tracing import Kind, Tracer, end_request_span


class EntryPoint:
    """The outermost ASGI application of a port. ``scope["state"]["exchange"]`` is the request's :class:`Exchange`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, workload: Workload, tracer: Tracer, budget: ByteBudget) -> None:
        self._app = app
        self._metrics = metrics
        self._workload = workload
        self._tracer = tracer
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._budget)
        scope["state"]["exchange"] = exchange
        try:
            if scope["method"] == "POST":
                await self._traced(exchange, scope, receive)
            else:
                await self._app(scope, receive, exchange.send)
        finally:
            self._workload.remove(exchange.work)
            exchange.close()
            exchange.record.close(self._metrics)

    async def _traced(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        """Only POST requests get a span: every inference is a POST."""
        record = exchange.record
        span = self._tracer.start("POST", Kind.SERVER, record.trace)
        record.trace = span.trace
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            end_request_span(span, record, getattr(scope.get("route"), "path", None))
