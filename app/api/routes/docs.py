"""``/docs``, ``/openapi.json`` and a page for each error code. All pages work offline.

Keeps rendered OpenAPI documents, because building one takes milliseconds on the event loop.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Mount

from app.admission.keys import Key
from app.api.dialect import Dialect, Layer
from app.api.error_table import ERROR_BY_CODE, ROW_BY_ERROR
from app.api.exchange import exchange_of
from app.api.openapi.document import openapi_of
from app.api.pages import Page, PageFiles
from app.api.responses import JsonResponse
from app.api.routing import router_of
from app.core.errors import GatewayError, NotFound
from app.core.json import Schema, json_of
from app.pipelines.catalog import Catalog

MAX_KEPT_BYTES = 16 * 1024 * 1024
"""Limit of all kept documents together; the newest one is always kept."""

_Names = frozenset[str] | None
_Scope = tuple[_Names, _Names]
"""The pipelines and the dialects that a key allows; None: all of them."""


class KeptDocuments:
    """The documents of the catalog as it is now, one for each scope of keys."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._names: Sequence[str] = ()
        self._objects: Sequence[object] = ()
        """With the names, the parts of the catalog that the kept documents describe."""
        self._documents: dict[_Scope, bytes] = {}

    def document(self, key: Key | None, build: Callable[[], Schema]) -> bytes:
        """Returns the JSON for callers with this key, which ``build`` describes. Drops the least recently used ones."""
        self._drop_outdated()
        scope = (None, None) if key is None else (key.pipelines, key.dialects)
        document = self._documents.pop(scope, None) or json_of(build())
        self._documents[scope] = document
        while len(self._documents) > 1 and sum(map(len, self._documents.values())) > MAX_KEPT_BYTES:
            del self._documents[next(iter(self._documents))]
        return document

    def _drop_outdated(self) -> None:
        names, objects = _names_in(self._catalog), _objects_in(self._catalog)
        if names != self._names or len(objects) != len(self._objects) or not all(map(is_, objects, self._objects)):
            self._names, self._objects = names, objects
            self._documents.clear()


def _names_in(catalog: Catalog) -> Sequence[str]:
    return [*catalog.entries, *catalog.oip_models.names]


def _objects_in(catalog: Catalog) -> Sequence[object]:
    """What a document describes. A change replaces an object, so comparing the identities is enough, and cheap."""
    pipelines = [part for entry in catalog.entries.values() for part in (entry.spec, entry.pipeline)]
    return [*pipelines, *catalog.oip_models.configs]


_files = PageFiles(directory=Path(__file__).parents[1] / "static", packages=[("fastapi_offline", "static")])
assets = Mount("/docs/assets", _files, name="docs-assets")


class DocumentRoute:
    """The OpenAPI document: what the caller's key allows."""

    def __init__(
        self, dialects: Mapping[str, Dialect], layers: Sequence[Layer], catalog: Catalog, *, needs_keys: bool = False
    ) -> None:
        self._dialects = dialects
        self._layers = layers
        self._kept = KeptDocuments(catalog)
        self._needs_keys = needs_keys

    def router(self) -> APIRouter:
        return router_of({"/openapi.json": self.openapi})

    async def openapi(self, request: Request) -> Response:
        key = exchange_of(request).key
        document = self._kept.document(key, lambda: self._document(key))
        return Response(document, media_type=JsonResponse.media_type)

    def _document(self, key: Key | None) -> Schema:
        spoken = [each.described(key) for name, each in self._dialects.items() if key is None or key.speaks(name)]
        document = openapi_of([*spoken, *(layer.described for layer in self._layers)], needs_keys=self._needs_keys)
        for layer in self._layers:
            layer.complete(document)
        return document


def pages() -> APIRouter:
    """The pages, which are the same for every caller, and need no key."""
    return router_of({"/docs": _docs, "/docs/errors": _errors, "/docs/errors/{code}": _error})


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
