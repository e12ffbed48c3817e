"""What pages of other sites may send to the gateway and read from it: CORS, WebSockets, and a guard without API keys.

Without keys, a page could use a browser on a machine that can call the gateway. It has two ways: a name of its own that
resolves to the gateway's address (DNS rebinding), and a form, which needs no preflight of CORS.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.exchange import Exchange
from app.core.errors import Forbidden, InvalidRequest
from app.core.text import is_loopback

_HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::[0-9]*)?")
_ADD_ORIGIN = "Add the page's origin to GATEWAY_CORS_ORIGINS."


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """``hosts``: served besides those of loopback. ``origins``: whose pages may send a POST."""

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    refuses_cross_site: bool = True

    def check(self, exchange: Exchange) -> None:
        """Raises InvalidRequest. A request without the headers of a browser passes."""
        header, server = exchange.header(b"host"), exchange.scope["server"]
        host = None if header is None else host_of(header)
        # The address that the connection was made to is served too: probes use it, and a page cannot take it.
        is_own = host is None or host in self.hosts or _is_loopback(host) or (server is not None and server[0] == host)
        if not is_own:
            raise InvalidRequest(
                "The gateway does not answer for the host of this request.",
                hint="Call it as localhost or 127.0.0.1, or add the host to GATEWAY_ALLOWED_HOSTS.",
            )
        if not self.refuses_cross_site or exchange.record.method != "POST":
            return
        if exchange.header(b"sec-fetch-site") == "cross-site" and not _allows(self.origins, exchange.header(b"origin")):
            raise InvalidRequest("A page of another site sent this request.", hint=_ADD_ORIGIN)


def check_socket_origin(exchange: Exchange, allowed: Collection[str]) -> None:
    """Raises Forbidden for a page of another site that CORS does not allow.

    A browser opens a WebSocket to any address, and sends the page's origin. Requests without an origin pass.
    """
    origin = exchange.header(b"origin")
    if origin is None or _allows(allowed, origin):
        return
    if origin.partition("://")[2].lower() != (exchange.header(b"host") or "").lower():
        raise Forbidden("Pages of this origin may not open a WebSocket.", hint=_ADD_ORIGIN)


def _allows(allowed: Collection[str], origin: str | None) -> bool:
    return origin in allowed or "*" in allowed


@lru_cache(maxsize=128)
def host_of(header: str) -> str:
    """Returns the host of a Host header: in lower case, without port, brackets and final dot."""
    found = _HOST.fullmatch(header)
    return (found[1] or found[2] or "").lower().removesuffix(".") if found else header


_is_loopback = lru_cache(maxsize=128)(is_loopback)

EXPOSED_HEADERS = ("X-Request-ID", "X-Early-Exit", "Server-Timing", "Location", "Retry-After", "X-Should-Retry")
READ_HEADERS = (
    *("Authorization", "X-API-Key", "Content-Type", "Last-Event-ID"),
    *("traceparent", "tracestate", "X-Request-Timeout", "X-Request-ID"),
)
IGNORED_HEADERS = (
    "User-Agent",  # Vercel's AI SDK. Firefox asks for it; Chromium does not let a page set it.
    *("baggage", "sentry-trace"),  # OpenTelemetry and Sentry, for every request of a page.
    *("Cache-Control", "Pragma", "X-Requested-With"),  # Libraries for fetch and XMLHttpRequest.
    *("OpenAI-Organization", "OpenAI-Project", "OpenAI-Beta"),  # OpenAI's client, if it is configured with them.
    # Values that are longer than 128 bytes or have unusual characters need a preflight.
    *("Accept", "Accept-Language", "Content-Language"),
)
"""Harmless headers that libraries add in a page. Without them in the list, the browser would send no request."""

_OF_OPENAI = re.compile(r"x-stainless-[a-z0-9-]+")
"""OpenAI's client adds headers of this family; each version adds others, and CORS knows no prefixes."""
METHODS = ("GET", "HEAD", "POST", "DELETE")


class Cors(CORSMiddleware):
    """The request's exchange adds the headers to its answer, whoever sends it. Source: the Fetch standard."""

    def __init__(
        self, app: ASGIApp, origins: Collection[str], headers: Iterable[str] = (), exposed: Iterable[str] = ()
    ) -> None:
        """``headers``: those of requests that are allowed besides the usual ones; ``exposed``: those of answers."""
        allowed = (*READ_HEADERS, *IGNORED_HEADERS, *headers)
        super().__init__(app, origins, METHODS, allowed, expose_headers=(*EXPOSED_HEADERS, *exposed))

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
