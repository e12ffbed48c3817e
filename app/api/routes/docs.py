"""``/docs``, ``/openapi.json`` and a page for each error code; nothing is fetched from the internet."""

import html
from pathlib import Path

import fastapi_offline
from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from app.api.error_table import ERROR_BY_CODE, ROW_BY_ERROR
from app.api.openapi import openapi_of
from app.api.responses import JsonResponse
from app.api.state import gateway_of
from app.domain.errors import GatewayError, NotFound

router = APIRouter()

_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:46rem;margin:3rem auto;padding:0 1rem}"
    "td,th{text-align:left;padding:.2rem 1rem .2rem 0}"
)
_ASSETS = Path(fastapi_offline.__file__).parent / "static"
assets = Mount("/docs/assets", StaticFiles(directory=_ASSETS), name="docs-assets")


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return JsonResponse(openapi_of(gateway_of(request).catalog))


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
        f'<tr><td>{row.status}</td><td><a href="/docs/errors/{error.code}">{error.code}</a></td>'
        f"<td>{html.escape(error.title)}</td><td>{error.outcome}</td></tr>"
        for error, row in ROW_BY_ERROR.items()
    )
    head = "<tr><th>status</th><th>code</th><th>meaning</th><th>outcome in metrics</th></tr>"
    return _page("Errors", f"<table>{head}{rows}</table>")


@router.get("/docs/errors/{code}")
async def error(code: str, _request: Request) -> Response:
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


def _page(title: str, body: str) -> HTMLResponse:
    return HTMLResponse(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title} - triton-gateway</title>"
        f"<style>{_STYLE}</style><h1>{title}</h1>{body}</html>"
    )
