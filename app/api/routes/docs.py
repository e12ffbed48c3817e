"""``/docs``, ``/openapi.json`` and a page for each error code; nothing is fetched from the internet."""

import html
from pathlib import Path

import fastapi_offline
from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from app.api.error_pages import ERROR_PAGES, ErrorPage
from app.api.openapi import openapi_of
from app.api.rendering import json_response
from app.api.state import gateway_of
from app.domain.errors import NotFound

router = APIRouter()

_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:46rem;margin:3rem auto;padding:0 1rem}"
    "td,th{text-align:left;padding:.2rem 1rem .2rem 0}"
)
_ASSETS = Path(fastapi_offline.__file__).parent / "static"
assets = Mount("/docs/assets", StaticFiles(directory=_ASSETS), name="docs-assets")


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return json_response(openapi_of(gateway_of(request).catalog))


@router.get("/docs")
async def docs(_request: Request) -> Response:
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="triton-gateway",
        swagger_js_url="/docs/assets/swagger-ui-bundle.js",
        swagger_css_url="/docs/assets/swagger-ui.css",
        swagger_favicon_url="data:,",
    )


@router.get("/docs/errors")
async def errors(_request: Request) -> Response:
    rows = "".join(
        f'<tr><td>{page.status}</td><td><a href="/docs/errors/{code}">{code}</a></td>'
        f"<td>{html.escape(page.title)}</td><td>{page.outcome}</td></tr>"
        for code, page in ERROR_PAGES.items()
    )
    head = "<tr><th>status</th><th>code</th><th>meaning</th><th>outcome in metrics</th></tr>"
    return _page("Errors", f"<table>{head}{rows}</table>")


@router.get("/docs/errors/{code}")
async def error(code: str, _request: Request) -> Response:
    page = ERROR_PAGES.get(code)
    if page is None:
        raise NotFound("There is no such error code.", hint="GET /docs/errors lists all of them.")
    return _page(f"{page.status} {code}", _body_of(page))


def _body_of(page: ErrorPage) -> str:
    again = "Trying again can help." if page.retryable else "The same request will fail again."
    return (
        f"<p><b>{html.escape(page.title)}.</b> {html.escape(page.meaning)}</p><p>{html.escape(page.remedy)}</p>"
        f"<p>{again} Counted as <code>{page.outcome}</code> in <code>triton_gateway_requests_total</code>.</p>"
        '<p><a href="/docs/errors">All error codes</a></p>'
    )


def _page(title: str, body: str) -> HTMLResponse:
    return HTMLResponse(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title} - triton-gateway</title>"
        f"<style>{_STYLE}</style><h1>{title}</h1>{body}</html>"
    )
