"""CORS for every answer, also for one that an exchange sends directly to the connection. Source: the Fetch standard."""

import re
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

EXPOSED_HEADERS = ("X-Request-ID", "X-Early-Exit", "Server-Timing", "Location", "Retry-After", "X-Should-Retry")
READ_HEADERS = (
    "Authorization",
    "X-API-Key",
    "Content-Type",
    "Last-Event-ID",
    "traceparent",
    "tracestate",
    "X-Request-Timeout",
    "X-Request-ID",
)
IGNORED_HEADERS = (
    # Vercel's AI SDK. Firefox asks for it; Chromium does not let a page set it.
    "User-Agent",
    # OpenTelemetry and Sentry, for every request of a page.
    "baggage",
    "sentry-trace",
    # Libraries for fetch and XMLHttpRequest.
    "Cache-Control",
    "Pragma",
    "X-Requested-With",
    # OpenAI's client, if it is configured with them.
    "OpenAI-Organization",
    "OpenAI-Project",
    "OpenAI-Beta",
    # Values that are longer than 128 bytes or have unusual characters need a preflight.
    "Accept",
    "Accept-Language",
    "Content-Language",
)
"""Harmless headers that libraries add in a page. Without them in the list, the browser would send no request."""

_OF_OPENAI = re.compile(r"x-stainless-[a-z0-9-]+")
"""OpenAI's client adds headers of this family; each version adds others, and CORS knows no prefixes."""
_METHODS = ("GET", "HEAD", "POST", "DELETE")


class Cors(CORSMiddleware):
    """Must run inside EntryPoint: the request's exchange adds the headers to its answer, whoever sends it."""

    def __init__(
        self, app: ASGIApp, origins: Collection[str], headers: Iterable[str] = (), exposed: Iterable[str] = ()
    ) -> None:
        """``headers``: those of requests that are allowed besides the usual ones; ``exposed``: those of answers."""
        allowed = (*READ_HEADERS, *IGNORED_HEADERS, *headers)
        super().__init__(app, origins, _METHODS, allowed, expose_headers=(*EXPOSED_HEADERS, *exposed))

    def preflight_response(self, request_headers: Headers) -> Response:
        """Is 204 also for a header that is not allowed: the browser then names it, which it cannot do for an error."""
        headers = super().preflight_response(request_headers).headers
        requested = map(str.strip, request_headers.get("access-control-request-headers", "").lower().split(","))
        headers["access-control-allow-headers"] += "".join(
            f", {name}" for name in requested if _OF_OPENAI.fullmatch(name)
        )
        del headers["content-length"], headers["content-type"]
        return Response(status_code=204, headers=headers)

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        origin = request_headers.get("origin")
        headers = MutableHeaders({"vary": "Origin"})
        if origin is not None and self.is_allowed_origin(origin):
            allowed = "*" if self.allow_all_origins else origin
            headers.update(
                {"timing-allow-origin": allowed, "access-control-allow-origin": allowed, **self.simple_headers}
            )
        scope["state"]["exchange"].cors_headers = headers.raw
        await self.app(scope, receive, send)
