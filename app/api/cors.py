"""CORS for every answer, also for one that an exchange sends directly to the connection. Source: the Fetch standard."""

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.exchange import Exchange, Header

EXPOSED_HEADERS = (
    *("X-Request-ID", "X-Early-Exit", "Server-Timing", "Location", "Retry-After", "X-Should-Retry"),
    *("X-Session-Step", "X-Session-Expires-In"),
)
READ_HEADERS = (
    "Authorization",
    "X-API-Key",
    "Content-Type",
    "Last-Event-ID",
    "Idempotency-Key",
    "traceparent",
    "tracestate",
    "X-Request-Timeout",
    "X-Request-ID",
    "X-Explain",
    "X-Session-Step",
    "X-Session-End",
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
_METHODS = b"GET, HEAD, POST, DELETE"
_ALLOW_ORIGIN = b"access-control-allow-origin"
_EXPOSE: Header = (b"access-control-expose-headers", ", ".join(EXPOSED_HEADERS).encode())
_VARY: Header = (b"vary", b"Origin")


class Cors:
    """Must run inside EntryPoint: the request's exchange adds the headers to its answer.

    Every preflight is answered with 204 and the allowed headers, also if it asks for others: the browser then names
    the header that is not in the list, which it cannot do for an error.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str], headers: Iterable[str] = ()) -> None:
        """``headers``: request headers that are allowed besides those that the gateway knows."""
        self._app = app
        self._origins = frozenset(origins)
        self._allowed = ", ".join([*READ_HEADERS, *IGNORED_HEADERS, *headers])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        origin = self._allowed_origin(exchange.header(b"origin"))
        if scope["method"] == "OPTIONS" and exchange.header(b"access-control-request-method") is not None:
            headers = self._preflight(origin, exchange.header(b"access-control-request-headers") or "")
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body"})
        else:
            exchange.cors_headers = [_VARY] if origin is None else _readable_by(origin)
            await self._app(scope, receive, send)

    def _allowed_origin(self, origin: str | None) -> bytes | None:
        """Returns the value of ``Access-Control-Allow-Origin``."""
        if origin is not None and "*" in self._origins:
            return b"*"
        return origin.encode("latin-1") if origin in self._origins else None

    def _preflight(self, origin: bytes | None, requested: str) -> list[Header]:
        of_openai = [name.strip() for name in requested.lower().split(",") if _OF_OPENAI.fullmatch(name.strip())]
        return [
            *([] if origin is None else [(_ALLOW_ORIGIN, origin)]),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", ", ".join([self._allowed, *of_openai]).encode()),
            (b"access-control-max-age", b"600"),
            (b"vary", b"Origin, Access-Control-Request-Headers"),
        ]


def _readable_by(origin: bytes) -> list[Header]:
    return [(_ALLOW_ORIGIN, origin), _EXPOSE, (b"timing-allow-origin", origin), _VARY]
