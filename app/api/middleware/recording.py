"""Gives every request its id and its record, and closes the record when the response is sent."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.workload import RequestWork, Workload
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord, request_id_of


class RecordingMiddleware:
    """The outermost middleware. ``scope["state"]`` gets the request's ``record`` and its ``work``.

    It adds ``X-Request-ID`` and ``Server-Timing`` to the response.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, workload: Workload) -> None:
        self.app = app
        self.metrics = metrics
        self.workload = workload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(request_id_of(Headers(scope=scope).get("x-request-id")), scope["method"], scope["path"])
        work = RequestWork()
        scope.setdefault("state", {}).update(record=record, work=work)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                work.is_answering = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = record.request_id
                headers["Server-Timing"] = record.server_timing()
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            self.workload.remove(work)
            record.close(self.metrics)
