"""The interface of a dialect: a folder next to this file and its name in ``app/main.py`` (decision 1).

Its routes of inference take the short path: they are found and called before FastAPI, whose middleware and router cost
more than a whole small inference.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.admission.keys import Key
from app.api.access import AccessCheck, Guard
from app.api.downloads import ImageDownloads
from app.api.exchange import Exchange
from app.api.failures import ErrorForm, FailureMiddleware
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.openapi.answers import TIMEOUT_HEADER
from app.api.openapi.document import Described
from app.api.problems import problem_response
from app.core.json import Schema
from app.core.share import WHOLE, Share
from app.lint.findings import Finding
from app.observability.statistics import Statistics
from app.pipelines.pipeline import Pipeline
from app.streams.store import StreamStore

Endpoint = Callable[[Exchange, Mapping[str, str], Send], Awaitable[None]]
"""Answers a request. The mapping has the path parameters."""


class ShortRoute(Route):
    """A route for one method. Its ``app`` is the plain ASGI form of the endpoint.

    ``error_form``: of its dialect. ``transport``: under which a request is counted that its guard refuses.
    """

    guard: Guard | None = None
    """Is called before the endpoint, and before the body is read."""

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        error_form: ErrorForm = problem_response,
        *,
        transport: str = "unary",
        method: str = "POST",
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self._endpoint = endpoint
        self._transport = transport
        self.app = FailureMiddleware(self._call, lambda _path: error_form)

    def check(self, exchange: Exchange) -> None:
        """Checks the API key. Raises Unauthenticated or Forbidden."""
        if self.guard is not None:
            self.guard(exchange)

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
        routes = [route for route in app.routes if isinstance(route, ShortRoute)]
        self._routes = {
            method: [route for route in routes if method in (route.methods or ())] for method in ("GET", "POST")
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        for route in self._routes.get(scope["method"], ()):
            if (found := route.path_regex.match(scope["path"])) is not None:
                scope["route"], scope["path_params"] = route, found.groupdict()
                return route.app(scope, receive, send)
        return self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Services:
    """What the gateway offers to its dialects."""

    inference: Inference
    limits: Limits
    store: StreamStore | None
    """None if resumable streams are off."""
    statistics: Callable[[], Awaitable[Statistics]]
    """Of all processes."""
    findings: Callable[[], Awaitable[Sequence[Finding]]]
    """What the linter finds now. Raises GatewayError."""
    share: Share = WHOLE
    """The part of this process in the limits."""
    downloads: ImageDownloads | None = None
    """None if images cannot be given by their addresses."""
    origins: Collection[str] = ()
    """The origins whose pages may read answers and open WebSockets."""
    layers: Sequence["Layer"] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One HTTP API of the gateway. All dialects share the pipelines, the engine, the limits and the streams."""

    routers: Sequence[APIRouter]
    short_routes: Sequence[ShortRoute]
    """The routes of inference."""
    described: Callable[[Key | None], Described]
    """Its part of the OpenAPI document, as the models are now, for the caller with this key."""
    bearer_routers: Sequence[APIRouter] = ()
    """Routes at addresses that are secrets themselves: they need no key."""
    keyless_routers: Sequence[APIRouter] = ()
    """Routes that ignore keys: health."""
    error_forms: Sequence[tuple[str, ErrorForm]] = ()
    """Path prefix -> the form of errors under it. Errors at other paths are problem objects."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A feature of the requests of all pipelines, in a folder of its own, that a request header turns on."""

    router: APIRouter
    """Routes that every key may call."""
    admin_router: APIRouter
    described: Described
    header: Schema
    """The request header, as a parameter in the OpenAPI document."""
    permission: str
    """A member of ``GET /v1/pipelines``: whether the caller may send the header."""
    allows: Callable[[Key | None], bool]
    """The value of this member."""
    admitted: Callable[[Exchange, Pipeline], None] | None
    """Is called with each admitted request. It may set ``on_end`` of the request's record. None if the layer is off."""

    def complete(self, document: Schema) -> None:
        """Adds the header and the permission to what the dialects describe."""
        paths, schemas = document["paths"], document["components"]["schemas"]
        for path, operations in paths.items():
            parameters = operations.get("post", {}).get("parameters", ())
            if path.startswith("/v1/") and TIMEOUT_HEADER in parameters:
                paths[path] = operations | {"post": operations["post"] | {"parameters": [*parameters, self.header]}}
        if (listed := schemas.get("PipelineList")) is not None:
            member = {"type": "boolean", "description": f"Whether this caller may send `{self.header['name']}`"}
            properties = listed["properties"] | {self.permission: member}
            schemas["PipelineList"] = listed | {"properties": properties, "required": list(properties)}


def add_routes(app: FastAPI, dialect: Dialect, access: AccessCheck | None) -> None:
    """Adds the routes of a dialect. ``access``: None if no keys are required."""
    required, accepted = ([], []) if access is None else ([Depends(access.required)], [Depends(access.accepted)])
    for router in dialect.routers:
        app.include_router(router, dependencies=required)
    for router in dialect.bearer_routers:
        app.include_router(router, dependencies=accepted)
    for router in dialect.keyless_routers:
        app.include_router(router)
    for route in dialect.short_routes:
        route.guard = None if access is None else access.require
    app.router.routes.extend(dialect.short_routes)
