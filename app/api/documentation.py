"""The pages for people: ``/docs``, ``/openapi.json``, a page for each error code, and the console. All work offline.

A policy lets a page load only the gateway's own files.
"""

import html
from collections.abc import Sequence
from os import PathLike, stat_result
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Receive, Scope, Send

from app.api.access import allows_model, allows_pipeline
from app.api.endpoint import Answering, EndpointGroup, Found, Layer
from app.api.error_table import ERROR_BY_CODE, ROW_BY_ERROR
from app.api.exchange import Exchange, JsonResponse
from app.api.openapi import Visible, document_of
from app.core.errors import NotFound
from app.core.json import json_of
from app.pipelines.catalog import Catalog

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

    def page(self, name: str) -> Answering:
        return lambda exchange, _found: self.get_response(name, exchange.scope)

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


MAX_KEPT_BYTES = 16 * 1024 * 1024
"""Limit of all kept documents together; the newest one is always kept."""

_Scope = tuple[frozenset[str] | None, ...]
"""The pipelines and the dialects that a key allows; None: all of them. Empty without a key."""


class Documents:
    """The OpenAPI documents of the catalog as it is now, one for each scope of keys.

    They are kept, because building one takes milliseconds on the event loop.
    """

    def __init__(
        self, groups: Sequence[EndpointGroup], layers: Sequence[Layer], catalog: Catalog, *, needs_keys: bool = False
    ) -> None:
        self._groups = groups
        self._layers = layers
        self._catalog = catalog
        self._needs_keys = needs_keys
        self._described: Sequence[object] = ()
        """What the kept documents describe. A change replaces an object."""
        self._kept: dict[_Scope, bytes] = {}

    async def openapi(self, exchange: Exchange, _found: Found) -> Response:
        """Keeps the document, and drops outdated ones, and then the least recently used ones."""
        described = [*(each.pipeline for each in self._catalog.entries.values()), *self._catalog.oip_models.configs]
        if described != self._described:
            self._described = described
            self._kept.clear()
        key = exchange.key
        allowed = [] if key is None else [key.pipelines, key.dialects]
        scope = tuple(None if each is None else frozenset(each) for each in allowed)
        document = self._kept.pop(scope, None)
        if document is None:
            groups = [each for each in self._groups if key is None or each.dialect is None or key.speaks(each.dialect)]
            entries, models = self._catalog.entries.items(), self._catalog.oip_models.configs
            visible = Visible(
                [entry.pipeline for name, entry in entries if entry.pipeline and allows_pipeline(key, name)],
                [each for each in models if allows_model(key, self._catalog, each.name)],
            )
            document = json_of(document_of(groups, visible, self._layers, needs_keys=self._needs_keys))
        self._kept[scope] = document
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > MAX_KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return Response(document, media_type=JsonResponse.media_type)


DOCS = PageFiles(Path(__file__).parent / "static", packages=[("fastapi_offline", "static")])
CONSOLE = PageFiles(Path(__file__).parents[1] / "console" / "static")


async def errors(_exchange: Exchange, _found: Found) -> Response:
    rows = "".join(
        f'<tr><td>{row.status}</td><td><a href="/docs/errors/{error.code}">{error.code}</a></td>'
        f"<td>{html.escape(error.title)}</td><td>{error.outcome}</td></tr>"
        for error, row in sorted(ROW_BY_ERROR.items(), key=lambda item: item[1].status)
    )
    names = ("status", "code", "meaning", "outcome in metrics")
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _page("Errors", f'<div class=wide tabindex=0 role=region aria-label="Error codes">{table}</div>')


async def error(_exchange: Exchange, found: Found) -> Response:
    kind = ERROR_BY_CODE.get(found["code"])
    if kind is None:
        raise NotFound("No error has this code.", hint="GET /docs/errors lists the codes.")
    row = ROW_BY_ERROR[kind]
    retry = "A retry can succeed." if kind.retryable else "A retry of the same request fails again."
    return _page(
        f"{row.status} {kind.code}",
        f"<p><b>{html.escape(kind.title)}.</b> {html.escape(row.meaning)}</p><p>{html.escape(row.remedy)}</p>"
        f"<p>{retry} <code>triton_gateway_requests_total</code> counts it as <code>{kind.outcome}</code>.</p>"
        '<p><a href="/docs/errors">All error codes</a></p>',
    )


def _page(title: str, body: str) -> Page:
    return Page(
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<meta name=color-scheme content="light dark">'
        f"<title>{title} · triton-gateway</title>"
        '<link rel=icon href="data:,"><link rel=stylesheet href="/docs/assets/colours.css">'
        '<link rel=stylesheet href="/docs/assets/page.css"></head><body>'
        '<nav class=bar aria-label=Gateway><a class=brand href="/">triton-gateway</a><a href="/">Console</a>'
        '<a href="/docs">API</a><a href="/docs/errors">Errors</a></nav>'
        f"<main class=text><h1>{title}</h1>{body}</main></body></html>"
    )
