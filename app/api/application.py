"""The outermost ASGI application of each port: routes requests, and turns every exception of a route into an answer.

The answer has the form of the route's dialect. Bounds what refused requests cost: callers that ask again at once would
otherwise take the CPU from the models.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.body_memory import ByteBudget
from app.api.browser_rules import METHODS, BrowserRules
from app.api.call import Inference
from app.api.error_table import ErrorForm, problem_response
from app.api.exchange import Exchange
from app.core.aio import LeakyBucket
from app.core.errors import GatewayError, Internal, InvalidRequest, MethodNotAllowed, NotFound, TooManyRequests
from app.observability.tracing import SpanKind, end_request_span

REFUSALS_PER_S = 1000
"""Refusals that are answered in a second. Each takes about 0.2 ms of CPU."""
LONGEST_DELAY_S = 1.0

_refusals = LeakyBucket(REFUSALS_PER_S, REFUSALS_PER_S // 10, LONGEST_DELAY_S)
"""The refusals of this process."""
_log = logging.getLogger(__name__)


async def delay_refusal() -> None:
    """Does not wait unless there are too many refusals. The connection is not read meanwhile."""
    now = monotonic()
    delay_s = _refusals.turn(now) - now
    if delay_s > 0:
        await asyncio.sleep(delay_s)


@dataclass(eq=False)
class Application:
    """``scope["state"]["exchange"]`` is the request's :class:`Exchange`.

    Answers domain errors, unexpected exceptions, addresses without a route, and requests that the drain ends. If the
    answer has begun, the exception propagates and the server closes the connection.

    ``hints``: path -> the hint of its 404, with "" for all other paths. ``error_forms``: by the beginning of the path.
    """

    routes: Sequence[BaseRoute]
    inference: Inference
    budget: ByteBudget
    hints: Mapping[str, str]
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    rules: BrowserRules | None = None
    cors: Callable[[ASGIApp], ASGIApp] | None = None

    def __post_init__(self) -> None:
        self._router = APIRouter(routes=list(self.routes), redirect_slashes=False)
        posts = (each for each in self.routes if isinstance(each, Route) and "POST" in (each.methods or ()))
        self._inference_routes = [each for each in posts if getattr(each.endpoint, "transport", None) is not None]
        self._tracer = None if self.inference.tracer.is_noop else self.inference.tracer
        self._app = self._route if self.cors is None else self.cors(self._route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send, self.budget)
        record, span = exchange.record, None
        scope["state"]["exchange"] = exchange
        if self._tracer is not None and record.method == "POST":  # every inference is a POST
            span = self._tracer.start("POST", SpanKind.SERVER, record.trace)
            record.trace = span.trace
        try:
            if self.rules is not None:
                self.rules.check(exchange)
            await self._app(scope, receive, exchange.send)
        except (Exception, asyncio.CancelledError) as exc:
            error = self._error_of(exc, exchange)
            if error is not None:
                record.fail(error)
            if error is None or exchange.is_answering:
                raise
            if error is not exc and isinstance(error, Internal):
                _log.exception("unexpected error", extra={"request_id": record.request_id})
            if isinstance(error, TooManyRequests):
                await delay_refusal()
            own_form = None if isinstance(exc, HTTPException) else getattr(scope.get("endpoint"), "error_form", None)
            forms = (form for prefix, form in self.error_forms if record.path.startswith(prefix))
            response = (own_form or next(forms, problem_response))(error, record.request_id)
            if isinstance(error, MethodNotAllowed):
                response.headers["Allow"] = self._methods_of(record.path)
            await response(scope, receive, exchange.send)
        finally:
            if span is not None:
                end_request_span(span, record, getattr(scope.get("endpoint"), "path", None))
            record.count(self.inference.metrics)
            exchange.connection.after_writing(partial(self._close, exchange))

    def _close(self, exchange: Exchange) -> None:
        self.inference.workload.remove(exchange)
        exchange.close()
        exchange.record.log()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Looks for a route of inference first, as the router would: the router takes 3 us more (decision 3)."""
        scope["app"] = self._router  # Starlette then raises HTTPException if no route matches
        app: ASGIApp = self._router.app
        if scope["method"] == "POST":
            for route in self._inference_routes:
                if (found := route.path_regex.match(scope["path"])) is not None:
                    scope["endpoint"], scope["path_params"], app = route.endpoint, found.groupdict(), route.app
                    break
        await app(scope, receive, send)

    def _error_of(self, exc: BaseException, exchange: Exchange) -> GatewayError | None:
        """Returns the error for the caller; None for a cancellation that is not caused by the drain."""
        if isinstance(exc, GatewayError):
            return exc
        if isinstance(exc, asyncio.CancelledError):
            return exchange.cause_of_cancellation()
        if not isinstance(exc, HTTPException):
            return Internal("The gateway failed. Its log shows the cause under the request's id.")
        path = exchange.record.path
        if exc.status_code == 405:
            hint = f"Use one of: {self._methods_of(path)}."
            return MethodNotAllowed("This address does not accept this method.", hint=hint)
        if exc.status_code == 404:
            return NotFound("The gateway serves nothing at this address.", hint=self.hints.get(path, self.hints[""]))
        return InvalidRequest("The request is malformed.")

    def _methods_of(self, path: str) -> str:
        """All methods of the routes at the path. Mounts of files support GET and HEAD."""
        routes = [each for each in self.routes if isinstance(each, Route) and each.path_regex.match(path)]
        methods = {method for route in routes for method in route.methods or ()} or {"GET", "HEAD"}
        return ", ".join(sorted(methods, key=METHODS.index))
