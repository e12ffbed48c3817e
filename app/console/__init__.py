"""The console at ``/`` and ``/console``: plain HTML, CSS and ES modules.

The page uses only the public API and loads only its own files, which are in `static/`. `app/main.py` mounts it.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Mount

from app.api.pages import HEADERS, PageFiles
from app.api.responses import JsonResponse
from app.api.routing import router_of

_files = PageFiles(directory=Path(__file__).parent / "static")
files = Mount("/console", _files, name="console")


def router(*, may_load: bool) -> APIRouter:
    """``may_load``: whether the page offers to send many requests. The API itself is the same with each setting."""

    async def settings(_request: Request) -> Response:
        return JsonResponse({"may_load": may_load}, headers=HEADERS)

    return router_of({"/": _page, "/console/settings": settings})


async def _page(request: Request) -> Response:
    return await _files.page("index.html", request)
