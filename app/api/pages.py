"""HTML pages and their files, under a policy that lets a page load only the gateway's own files."""

from os import PathLike, stat_result
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""The pages show texts of models and callers, so only the gateway's scripts may run. Caches always revalidate."""

_FILE_HEADERS = {**HEADERS, "Accept-Ranges": "none"}
_SHARED = Path(__file__).parent / "static" / "shared"


class Page(HTMLResponse):
    def __init__(self, content: str) -> None:
        super().__init__(content, headers=HEADERS)


class PageFiles(StaticFiles):
    """A folder of files, and beside them the files that all pages share."""

    def __init__(self, directory: Path, packages: list[str | tuple[str, str]] | None = None) -> None:
        super().__init__(directory=directory, packages=packages)
        self.all_directories.append(_SHARED)

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = _WholeFile(full_path, status_code, _FILE_HEADERS, stat_result=stat_result)
        is_known = self.is_not_modified(response.headers, Headers(scope=scope))
        return NotModifiedResponse(response.headers) if is_known else response


class _WholeFile(FileResponse):
    """Ignores ``Range``, which RFC 9110 (14.2) allows: the files are small."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        await super().__call__({**scope, "headers": headers}, receive, send)
