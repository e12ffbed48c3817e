"""An endpoint: what answers one method of one address. ``app/routes.py`` lists all of them.

A route is Starlette's, and calls its endpoint as an ASGI application (decision 3). Files that are mounted and unknown
addresses have no endpoint: what must hold for every request belongs in ``FailureMiddleware``.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.access import AccessCheck
from app.api.bodies import check_query
from app.api.exchange import Exchange
from app.api.failures import ErrorForm
from app.api.openapi import PROBLEMS, ErrorAnswers, Operation, Operations, Visible

Found = Mapping[str, Any]
"""The parameters in the path of a request."""
Answering = Callable[[Exchange, Found], Awaitable[Response | None]]
"""Returns the response, or None if it has sent the answer itself."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """``described``: in the OpenAPI document; None: not at all. ``transport``: counts a request whose key is refused.

    ``error_form``: None for the form of the dialect.
    """

    method: str
    path: str
    answer: Answering
    described: Operation | Operations | None = None
    transport: str | None = None
    error_form: ErrorForm | None = None
    key: Literal["required", "optional", "ignored"] = "required"
    """``optional``: the address is a secret itself, but a key that is sent must be valid."""
    middleware: Sequence[Middleware] = ()
    access: AccessCheck | None = None
    dialect: str | None = None

    def route(self, access: AccessCheck | None = None, dialect: str | None = None) -> Route:
        """``access``: None if no keys are required."""
        self.access, self.dialect = None if self.key == "ignored" else access, dialect
        return Route(self.path, self, methods=[self.method], middleware=self.middleware)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        if self.transport is None:  # an inference checks its query after its admission
            check_query(exchange)
        if self.access is not None:
            exchange.record.transport = self.transport
            self.check_key(exchange)
        response = await self.answer(exchange, scope["path_params"])
        if response is not None:
            await response(scope, receive, send)

    def check_key(self, exchange: Exchange) -> None:
        """Raises Unauthenticated or Forbidden. Otherwise sets the request's key and caller."""
        if self.access is not None:
            self.access.check(exchange, self.dialect, is_required=self.key == "required")


@dataclass(frozen=True, slots=True)
class EndpointGroup:
    """Endpoints that answer errors in one form: a dialect, or what is independent of the dialects."""

    endpoints: Sequence[Endpoint]
    tags: Callable[[Visible], Mapping[str, str]] = lambda _visible: {}
    """Their descriptions in the OpenAPI document, in the order of /docs."""
    errors: ErrorAnswers = PROBLEMS
    dialect: str | None = None
    """Also a name in the ``dialects`` of keys. None for a part that every key may call."""
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    """Path prefix -> the form of errors under it. Errors at other paths are problem objects."""
