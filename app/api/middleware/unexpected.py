"""Answers what no exception handler answers: unexpected exceptions, and requests that the drain ends."""

import asyncio
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.problems import problem_response
from app.api.workload import RequestWork
from app.domain.errors import GatewayError, Internal

_log = logging.getLogger(__name__)


class UnexpectedErrorMiddleware:
    """The innermost middleware, so that every other one adds its headers to this answer too.

    If the answer has begun, the exception goes on and the server closes the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except (Exception, asyncio.CancelledError) as exc:
            record = scope["state"]["record"]
            error = _error_of(exc, scope["state"]["work"])
            if error is not None:
                record.fail(error)
            if error is None or record.status:
                raise
            if isinstance(error, Internal):
                _log.exception("unexpected error", extra={"request_id": record.request_id})
            await problem_response(error, record.request_id)(scope, receive, send)


def _error_of(exc: BaseException, work: RequestWork) -> GatewayError | None:
    """What to tell the caller; None for a cancellation that does not come from the drain."""
    if isinstance(exc, asyncio.CancelledError):
        return work.cause_of_cancellation()
    return Internal("The gateway failed. Its log shows the cause under the request's id.")
