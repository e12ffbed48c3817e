"""``/`` and its files under ``/console``: plain HTML, CSS and ES modules."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Mount

from app.api.pages import PageFiles
from app.api.routing import Route

router = APIRouter(route_class=Route)

_files = PageFiles(directory=Path(__file__).parent / "static")
files = Mount("/console", _files, name="console")


@router.get("/")
async def console(request: Request) -> Response:
    return await _files.page("index.html", request)
