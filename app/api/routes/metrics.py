"""The admin port's metrics: the gateway's own, and Triton's relayed."""

import httpx
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from app.api.routing import Route
from app.api.state import gateway_of
from app.domain.errors import NotFound, UpstreamUnavailable

router = APIRouter(prefix="/metrics", route_class=Route)

RELAY_TIMEOUT_S = 5.0
_TLS = httpx.create_ssl_context()
"""Made once: reading the authorities' certificates takes some 20 ms, in which no stream moves."""


@router.get("")
async def gateway_metrics(request: Request) -> Response:
    return Response(generate_latest(gateway_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/triton")
async def triton_metrics(request: Request) -> Response:
    url = gateway_of(request).triton_metrics_url
    if url is None:
        raise NotFound("Triton's metrics are not configured.", hint="Set GATEWAY_TRITON_METRICS_URL.")
    try:
        async with httpx.AsyncClient(verify=_TLS, timeout=RELAY_TIMEOUT_S) as client:
            answer = await client.get(url)
    except httpx.HTTPError as exc:
        raise UpstreamUnavailable("Triton's metrics cannot be reached.") from exc
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
