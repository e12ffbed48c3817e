"""The console at ``/`` and ``/console``: plain HTML, CSS and ES modules.

The page uses only the public API and loads only its own files, which are in `static/`. `app/main.py` mounts it.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Mount

from app.api.pages import HEADERS, PageFiles
from app.api.responses import JsonResponse
from app.api.routing import Route

_files = PageFiles(directory=Path(__file__).parent / "static")
files = Mount("/console", _files, name="console")


class ConsoleRoutes:
    """``may_load``: whether the page offers to send many requests."""

    def __init__(self, *, may_load: bool) -> None:
        self._may_load = may_load

    def router(self) -> APIRouter:
        router = APIRouter(route_class=Route)
        router.add_api_route("/", self.page)
        router.add_api_route("/console/settings", self.settings)
        return router

    async def page(self, request: Request) -> Response:
        return await _files.page("index.html", request)

    async def settings(self, _request: Request) -> Response:
        """What the page offers. The API itself is the same with each setting."""
        return JsonResponse({"may_load": self._may_load}, headers=HEADERS)
