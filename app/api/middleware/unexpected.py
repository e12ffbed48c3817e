"""Answers exceptions that no handler expects."""

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.problems import problem_response
from app.domain.errors import Internal

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
        record = scope["state"]["record"]
        try:
            await self.app(scope, receive, send)
        except Exception:
            error = Internal("The gateway failed. Its log shows the cause under the request's id.")
            record.fail(error)
            if record.status:
                raise
            _log.exception("unexpected error", extra={"request_id": record.request_id})
            await problem_response(error, record.request_id)(scope, receive, send)
