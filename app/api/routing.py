"""Routes that answer HEAD as well as GET, with few query fields, and the list of the methods of a path."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.types import Scope

from app.core.errors import InvalidRequest

METHODS = ("GET", "HEAD", "POST", "DELETE")
MAX_QUERY_FIELDS = 128


class Route(APIRoute):
    """A route that answers HEAD if it answers GET; uvicorn then sends the same headers without the body."""

    methods: set[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.methods = {*self.methods, "HEAD"} if "GET" in self.methods else self.methods

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Checks the query first, because FastAPI parses it for every route."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            check_query(request.scope)
            return await handle(request)

        return checked


Endpoints = Mapping[str, Callable[..., Coroutine[Any, Any, Response]]]
"""Path -> what answers it."""
_NONE: Endpoints = {}


def router_of(get: Endpoints = _NONE, *, post: Endpoints = _NONE, delete: Endpoints = _NONE) -> APIRouter:
    """Returns a router of these endpoints."""
    router = APIRouter(route_class=Route)
    for method, endpoints in (("GET", get), ("POST", post), ("DELETE", delete)):
        for path, endpoint in endpoints.items():
            router.add_api_route(path, endpoint, methods=[method])
    return router


def check_query(scope: Scope) -> None:
    """Rejects a query with too many fields before anything parses it. Raises InvalidRequest."""
    if scope["query_string"].count(b"&") >= MAX_QUERY_FIELDS:
        raise InvalidRequest(f"The query string has more than {MAX_QUERY_FIELDS} fields.")


def methods_of_path(request: Request) -> list[str]:
    """All methods of the routes at the request's path. Mounts of files support GET and HEAD."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    methods = [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return methods or ["GET", "HEAD"]
