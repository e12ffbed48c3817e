"""Gives every request its id and its record, and closes the record when the answer is sent."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.observability.metrics import Metrics
from app.observability.record import RequestRecord, request_id_of


class RecordingMiddleware:
    """The outermost middleware: ``scope["state"]["record"]`` is the request's record.

    It adds ``X-Request-ID`` and ``Server-Timing`` to the answer.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(request_id_of(Headers(scope=scope).get("x-request-id")), scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = record.request_id
                headers["Server-Timing"] = record.server_timing()
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            record.close(self.metrics)
