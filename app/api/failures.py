"""Turns every exception of a route into an answer, in the form of the route's dialect.

Bounds what refused requests cost: callers that ask again at once would otherwise take the CPU from the models.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.exchange import Exchange
from app.api.problems import problem_response
from app.core.aio import LeakyBucket
from app.core.errors import GatewayError, Internal, InvalidRequest, MethodNotAllowed, NotFound, TooManyRequests

REFUSALS_PER_S = 1000
"""Refusals that are answered in a second. Each takes about 0.2 ms of CPU."""
LONGEST_DELAY_S = 1.0

_refusals = LeakyBucket(REFUSALS_PER_S, REFUSALS_PER_S // 10, LONGEST_DELAY_S)
"""The refusals of this process."""


async def delay_refusal() -> None:
    """Does not wait unless there are too many refusals. The connection is not read meanwhile."""
    now = monotonic()
    delay_s = _refusals.turn(now) - now
    if delay_s > 0:
        await asyncio.sleep(delay_s)


_log = logging.getLogger(__name__)
_METHODS = ("GET", "HEAD", "POST", "DELETE")

ErrorForm = Callable[[GatewayError, str], Response]
"""Maps an error and the request's id to the answer."""


@dataclass(frozen=True, slots=True)
class ErrorForms:
    """Returns the form of errors for a path: problem objects, or the form of the path's dialect."""

    by_beginning: Sequence[tuple[str, ErrorForm]] = ()

    def __call__(self, path: str) -> ErrorForm:
        return next((form for beginning, form in self.by_beginning if path.startswith(beginning)), problem_response)


class FailureMiddleware:
    """Answers domain errors, unexpected exceptions, addresses without a route, and requests that the drain ends.

    If the answer has begun, the exception propagates and the server closes the connection.
    """

    def __init__(
        self, router: Router, forms: ErrorForms, hint: str, hint_by_path: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """``hint``: for a 404 at a path that is not in ``hint_by_path``."""
        self.router = router
        routes = (route for route in router.routes if isinstance(route, Route) and "POST" in (route.methods or ()))
        self._inference = [route for route in routes if getattr(route.endpoint, "transport", None) is not None]
        self._forms = forms
        self._hint = hint
        self._hint_by_path = hint_by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self.router  # Starlette then raises HTTPException if no route matches
        try:
            # Looks for a route of inference first, as the router would: the router takes 3 us more (decision 3).
            app: ASGIApp = self.router.app
            if scope["method"] == "POST":
                for route in self._inference:
                    if (found := route.path_regex.match(scope["path"])) is not None:
                        scope["endpoint"], scope["path_params"], app = route.endpoint, found.groupdict(), route.app
                        break
            await app(scope, receive, send)
        except (Exception, asyncio.CancelledError) as exc:
            exchange: Exchange = scope["state"]["exchange"]
            error = self._error_of(exc, scope, exchange)
            if error is not None:
                exchange.record.fail(error)
            if error is None or exchange.is_answering:
                raise
            if error is not exc and isinstance(error, Internal):
                _log.exception("unexpected error", extra={"request_id": exchange.record.request_id})
            if isinstance(error, TooManyRequests):
                await delay_refusal()
            form = None if isinstance(exc, HTTPException) else getattr(scope.get("endpoint"), "error_form", None)
            response = (form or self._forms(scope["path"]))(error, exchange.record.request_id)
            if isinstance(error, MethodNotAllowed):
                response.headers["Allow"] = self._methods_of(scope)
            await response(scope, receive, send)

    def _error_of(self, exc: BaseException, scope: Scope, exchange: Exchange) -> GatewayError | None:
        """Returns the error for the caller; None for a cancellation that is not caused by the drain."""
        if isinstance(exc, GatewayError):
            return exc
        if isinstance(exc, asyncio.CancelledError):
            return exchange.cause_of_cancellation()
        if not isinstance(exc, HTTPException):
            return Internal("The gateway failed. Its log shows the cause under the request's id.")
        if exc.status_code == 405:
            hint = f"Use one of: {self._methods_of(scope)}."
            return MethodNotAllowed("This address does not accept this method.", hint=hint)
        if exc.status_code == 404:
            hint = self._hint_by_path.get(scope["path"], self._hint)
            return NotFound("The gateway serves nothing at this address.", hint=hint)
        return InvalidRequest("The request is malformed.")

    def _methods_of(self, scope: Scope) -> str:
        """All methods of the routes at the request's path. Mounts of files support GET and HEAD."""
        routes = [
            route for route in self.router.routes if isinstance(route, Route) and route.path_regex.match(scope["path"])
        ]
        methods = {method for route in routes for method in route.methods or ()} or {"GET", "HEAD"}
        return ", ".join(sorted(methods, key=_METHODS.index))
