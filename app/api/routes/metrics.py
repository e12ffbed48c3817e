"""The metrics on the admin port: the gateway's, and Triton's, which are relayed."""

import ssl
from collections.abc import Callable

import httpx
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from app.api.routing import Route
from app.domain.errors import NotFound, UpstreamUnavailable

RELAY_TIMEOUT_S = 5.0
_TLS = httpx.create_ssl_context()
"""Created once: reading the certificates takes about 20 ms, which would delay every stream."""


class MetricsRoutes:
    """``prepare`` is called before the page is made. ``triton_metrics_url``: Triton's own page, or None.

    ``tls``: for an https address.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        prepare: Callable[[], None],
        triton_metrics_url: str | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._registry = registry
        self._prepare = prepare
        self._tls = tls or _TLS
        self._triton_metrics_url = triton_metrics_url

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/metrics", route_class=Route)
        router.add_api_route("", self.gateway_metrics)
        router.add_api_route("/triton", self.triton_metrics)
        return router

    async def gateway_metrics(self, _request: Request) -> Response:
        self._prepare()
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def triton_metrics(self, _request: Request) -> Response:
        if self._triton_metrics_url is None:
            raise NotFound("Triton's metrics are not configured.", hint="Set GATEWAY_TRITON_METRICS_URL.")
        try:
            async with httpx.AsyncClient(verify=self._tls, timeout=RELAY_TIMEOUT_S) as client:
                answer = await client.get(self._triton_metrics_url)
        except httpx.HTTPError as exc:
            raise UpstreamUnavailable("Triton's metrics cannot be reached.") from exc
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
