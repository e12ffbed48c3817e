"""``/`` and its files under ``/console``: plain HTML, CSS and ES modules, held to the gateway's own origin."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

router = APIRouter()

_FOLDER = Path(__file__).parent / "static"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The page shows what models and callers wrote: no script runs but its own. A new release shows at the next load."""


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


files = Mount("/console", _Files(directory=_FOLDER), name="console")


@router.get("/")
async def console(_request: Request) -> Response:
    return FileResponse(_FOLDER / "index.html", headers=HEADERS)
