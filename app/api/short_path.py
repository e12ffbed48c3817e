"""The short path of inference: finds and calls inference routes before FastAPI does.

FastAPI's middleware and router cost more than a whole small inference.
"""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.access import Guard
from app.api.exchange import Exchange
from app.api.failures import ErrorForm, FailureMiddleware
from app.api.problems import problem_response

Endpoint = Callable[[Exchange, Mapping[str, str], Send], Awaitable[None]]
"""Answers a POST. The mapping has the path parameters."""


class ShortRoute(Route):
    """A route for POST. Its ``app`` is the plain ASGI form of the endpoint.

    ``error_form``: of its dialect. ``transport``: under which a request is counted that its guard refuses.
    """

    guard: Guard | None = None
    """Is called before the endpoint, and before the body is read."""

    def __init__(
        self, path: str, endpoint: Endpoint, error_form: ErrorForm = problem_response, *, transport: str = "unary"
    ) -> None:
        super().__init__(path, endpoint, methods=["POST"])
        self._endpoint = endpoint
        self._transport = transport
        self.app = FailureMiddleware(self._call, lambda _path: error_form)

    def parameters_in(self, path: str) -> dict[str, str] | None:
        """Returns the path parameters; None if the path does not match."""
        found = self.path_regex.match(path)
        return found.groupdict() if found else None

    def _call(self, scope: Scope, _receive: Receive, send: Send) -> Awaitable[None]:
        exchange: Exchange = scope["state"]["exchange"]
        if self.guard is not None:
            exchange.record.transport = self._transport  # a refused request counts too
            self.guard(exchange)
        return self._endpoint(exchange, scope["path_params"], send)


class ShortPath:
    """Calls the short routes of an application. The application itself answers all other requests."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._routes = [route for route in app.routes if isinstance(route, ShortRoute)]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["method"] == "POST":
            for route in self._routes:
                if (parameters := route.parameters_in(scope["path"])) is not None:
                    scope["route"], scope["path_params"] = route, parameters
                    return route.app(scope, receive, send)
        return self._app(scope, receive, send)
