"""Refuses requests that a page of another site makes a browser send to a gateway without API keys.

The browser may run on a machine that can call the gateway. Such a page has two ways: a name of its own that resolves
to the gateway's address (DNS rebinding), and a form, which needs no preflight of CORS.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.exchange import Exchange
from app.api.failures import ErrorForms
from app.core.errors import InvalidRequest
from app.core.loopback import is_loopback

_HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """``hosts``: served besides those of loopback. ``origins``: whose pages may send a POST."""

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    refuses_cross_site: bool = True


class BrowserGuard:
    """Must run inside EntryPoint. Applies the rules before anything else of the application."""

    def __init__(self, app: ASGIApp, rules: BrowserRules, forms: ErrorForms) -> None:
        self._app = app
        self._rules = rules
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request without the headers of a browser passes."""
        exchange: Exchange = scope["state"]["exchange"]
        rules, header, server, error = self._rules, exchange.header(b"host"), scope["server"], None
        host = None if header is None else host_of(header)
        # The address that the connection was made to is served too: probes use it, and a page cannot take it.
        is_own = host is None or host in rules.hosts or _is_loopback(host) or (server is not None and server[0] == host)
        if not is_own:
            error = InvalidRequest(
                "The gateway does not answer for the host of this request.",
                hint="Call it as localhost or 127.0.0.1, or add the host to GATEWAY_ALLOWED_HOSTS.",
            )
        elif scope["method"] == "POST" and exchange.header(b"sec-fetch-site") == "cross-site":
            is_listed = exchange.header(b"origin") in rules.origins or "*" in rules.origins
            if rules.refuses_cross_site and not is_listed:
                error = InvalidRequest(
                    "A page of another site sent this request.", hint="Add the page's origin to GATEWAY_CORS_ORIGINS."
                )
        if error is None:
            await self._app(scope, receive, send)
        else:
            exchange.record.fail(error)
            await self._forms(scope["path"])(error, exchange.record.request_id)(scope, receive, send)


@lru_cache(maxsize=128)
def host_of(header: str) -> str:
    """Returns the host of a Host header: in lower case, without port, brackets and final dot."""
    found = _HOST.fullmatch(header)
    return (found[1] or found[2] or "").lower().removesuffix(".") if found else header


_is_loopback = lru_cache(maxsize=128)(is_loopback)
