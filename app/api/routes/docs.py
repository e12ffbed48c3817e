"""``/docs``, ``/openapi.json`` and a page for each error code. All pages work offline."""

import html
from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Mount

from app.admission.keys import Key
from app.api.dialect import Dialect
from app.api.error_table import ERROR_BY_CODE, ROW_BY_ERROR
from app.api.exchange import exchange_of
from app.api.openapi.document import openapi_of
from app.api.openapi.kept import KeptDocuments
from app.api.pages import Page, PageFiles
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.domain.errors import GatewayError, NotFound
from app.domain.json_schema import Schema
from app.pipelines.catalog import Catalog

_files = PageFiles(directory=Path(__file__).parents[1] / "static", packages=[("fastapi_offline", "static")])
assets = Mount("/docs/assets", _files, name="docs-assets")


class DocumentRoute:
    """The OpenAPI document: what the caller's key allows."""

    def __init__(self, dialects: Sequence[Dialect], catalog: Catalog, *, needs_keys: bool = False) -> None:
        self._dialects = dialects
        self._kept = KeptDocuments(catalog)
        self._needs_keys = needs_keys

    def router(self) -> APIRouter:
        router = APIRouter(route_class=Route)
        router.add_api_route("/openapi.json", self.openapi)
        return router

    async def openapi(self, request: Request) -> Response:
        key = exchange_of(request).key
        document = self._kept.document(key, lambda: self._document(key))
        return Response(document, media_type=JsonResponse.media_type)

    def _document(self, key: Key | None) -> Schema:
        spoken = (each for each in self._dialects if key is None or key.speaks(each.name))
        return openapi_of((each.described(key) for each in spoken), needs_keys=self._needs_keys)


def pages() -> APIRouter:
    """The pages, which are the same for every caller, and need no key."""
    router = APIRouter(route_class=Route)
    router.add_api_route("/docs", _docs)
    router.add_api_route("/docs/errors", _errors)
    router.add_api_route("/docs/errors/{code}", _error)
    return router


async def _docs(request: Request) -> Response:
    return await _files.page("docs.html", request)


async def _errors(_request: Request) -> Response:
    rows = "".join(
        f'<tr><td>{row.status}</td><td><a href="/docs/errors/{error.code}">{error.code}</a></td>'
        f"<td>{html.escape(error.title)}</td><td>{error.outcome}</td></tr>"
        for error, row in ROW_BY_ERROR.items()
    )
    names = ("status", "code", "meaning", "outcome in metrics")
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _page("Errors", f'<div class=wide tabindex=0 role=region aria-label="Error codes">{table}</div>')


async def _error(code: str, _request: Request) -> Response:
    found = ERROR_BY_CODE.get(code)
    if found is None:
        raise NotFound("No error has this code.", hint="GET /docs/errors lists the codes.")
    return _page(f"{ROW_BY_ERROR[found].status} {code}", _body_of(found))


def _body_of(error: type[GatewayError]) -> str:
    row = ROW_BY_ERROR[error]
    retry = "A retry can succeed." if error.retryable else "A retry of the same request fails again."
    return (
        f"<p><b>{html.escape(error.title)}.</b> {html.escape(row.meaning)}</p><p>{html.escape(row.remedy)}</p>"
        f"<p>{retry} <code>triton_gateway_requests_total</code> counts it as <code>{error.outcome}</code>.</p>"
        '<p><a href="/docs/errors">All error codes</a></p>'
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
