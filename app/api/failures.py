"""Turns every exception of a route into an answer, in the form of the route's dialect.

Bounds what refused requests cost: callers that ask again at once would otherwise take the CPU from the models.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.exchange import Exchange, exchange_of
from app.api.problems import problem_response
from app.api.routing import methods_of_path
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

ErrorForm = Callable[[GatewayError, str], Response]
"""Maps an error and the request's id to the answer."""


@dataclass(frozen=True, slots=True)
class ErrorForms:
    """Returns the form of errors for a path: problem objects, or the form of the path's dialect."""

    by_beginning: Sequence[tuple[str, ErrorForm]] = ()

    def __call__(self, path: str) -> ErrorForm:
        return next((form for beginning, form in self.by_beginning if path.startswith(beginning)), problem_response)


def add_failure_handling(app: FastAPI, forms: ErrorForms, hint: str, hint_by_path: Mapping[str, str]) -> None:
    """``hint``: for a 404 at a path that is not in ``hint_by_path``."""
    app.add_exception_handler(HTTPException, _FrameworkRefusals(forms, hint, hint_by_path))
    app.add_middleware(FailureMiddleware, form_at=forms)


class FailureMiddleware:
    """Answers domain errors, unexpected exceptions, and requests that the drain ends.

    If the answer has begun, the exception propagates and the server closes the connection.
    """

    def __init__(self, app: ASGIApp, form_at: Callable[[str], ErrorForm]) -> None:
        """``form_at``: maps a path to the form of its errors."""
        self.app = app
        self._form_at = form_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except (Exception, asyncio.CancelledError) as exc:
            exchange: Exchange = scope["state"]["exchange"]
            error = _error_of(exc, exchange)
            if error is not None:
                exchange.record.fail(error)
            if error is None or exchange.work.is_answering:
                raise
            if error is not exc and isinstance(error, Internal):
                _log.exception("unexpected error", extra={"request_id": exchange.record.request_id})
            if isinstance(error, TooManyRequests):
                await delay_refusal()
            response = self._form_at(scope["path"])(error, exchange.record.request_id)
            await response(scope, receive, send)


def _error_of(exc: BaseException, exchange: Exchange) -> GatewayError | None:
    """Returns the error for the caller; None for a cancellation that is not caused by the drain."""
    if isinstance(exc, GatewayError):
        return exc
    if isinstance(exc, asyncio.CancelledError):
        return exchange.work.cause_of_cancellation()
    return Internal("The gateway failed. Its log shows the cause under the request's id.")


@dataclass(frozen=True, slots=True)
class _FrameworkRefusals:
    """Starlette's own errors: no route for the path, or no route for the method."""

    forms: ErrorForms
    hint: str
    hint_by_path: Mapping[str, str]

    async def __call__(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        if exc.status_code != 405:
            return self._refusal(request, self._error_of(exc.status_code, request.scope["path"]))
        allowed = ", ".join(methods_of_path(request))
        response = self._refusal(
            request, MethodNotAllowed("This address does not accept this method.", hint=f"Use one of: {allowed}.")
        )
        response.headers["Allow"] = allowed
        return response

    def _error_of(self, status: int, path: str) -> GatewayError:
        if status == 404:
            hint = self.hint_by_path.get(path, self.hint)
            return NotFound("The gateway serves nothing at this address.", hint=hint)
        return InvalidRequest("The request is malformed.")

    def _refusal(self, request: Request, error: GatewayError) -> Response:
        record = exchange_of(request).record
        record.fail(error)
        return self.forms(request.scope["path"])(error, record.request_id)
