"""The console at ``/`` and ``/console``: plain HTML, CSS and ES modules.

The page uses only the public API and loads only its own files, which are in `static/`. `app/main.py` mounts it.
"""

from pathlib import Path

from starlette.responses import Response
from starlette.routing import Mount

from app.api.endpoint import Answering, Found
from app.api.exchange import Exchange
from app.api.pages import HEADERS, PageFiles
from app.api.responses import JsonResponse

_files = PageFiles(directory=Path(__file__).parent / "static")
files = Mount("/console", _files, name="console")


def settings(*, may_load: bool) -> Answering:
    """``may_load``: whether the page offers to send many requests. The API itself is the same with each setting."""

    async def answer(_exchange: Exchange, _found: Found) -> Response:
        return JsonResponse({"may_load": may_load}, headers=HEADERS)

    return answer


async def page(exchange: Exchange, _found: Found) -> Response:
    return await _files.get_response("index.html", exchange.scope)
