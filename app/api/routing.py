"""Routes that answer HEAD as well as GET, and the list of the methods of a path."""

from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Match, Mount

METHODS = ("GET", "HEAD", "POST", "DELETE")


class Route(APIRoute):
    """A route that answers HEAD if it answers GET; uvicorn then sends the same headers without the body."""

    methods: set[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.methods = {*self.methods, "HEAD"} if "GET" in self.methods else self.methods


def methods_of_path(request: Request) -> list[str]:
    """All methods of the routes at the request's path. Mounts of files support GET and HEAD."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    methods = [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return methods or ["GET", "HEAD"]
