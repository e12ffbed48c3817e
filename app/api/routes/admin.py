"""The metrics on the admin port: the gateway's, and Triton's, which are relayed.

The receiver of Triton's spans on the admin port: OTLP over HTTP, as JSON.
"""

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from app.api.bodies import off_loop, read_json
from app.api.exchange import exchange_of
from app.api.limits import Limits
from app.api.responses import JsonResponse
from app.api.routing import router_of
from app.core.errors import InvalidJson, NotFound, UpstreamUnavailable
from app.observability.explain.spans import NotSpans, spans_in
from app.observability.explain.store import ExplainStore

RELAY_TIMEOUT_S = 5.0
_TLS = httpx.create_ssl_context()
"""Created once: reading the certificates takes about 20 ms, which would delay every stream."""


@dataclass(frozen=True, slots=True)
class MetricsRoutes:
    """``prepare`` is called before the page is made. ``triton_metrics_url``: Triton's own page, or None.

    ``tls``: for an https address.
    """

    page: Collector
    prepare: Callable[[], None]
    triton_metrics_url: str | None
    tls: ssl.SSLContext | None = None

    def router(self) -> APIRouter:
        return router_of({"/metrics": self.gateway_metrics, "/metrics/triton": self.triton_metrics})

    async def gateway_metrics(self, _request: Request) -> Response:
        self.prepare()
        return Response(generate_latest(self.page), media_type=CONTENT_TYPE_LATEST)

    async def triton_metrics(self, _request: Request) -> Response:
        if self.triton_metrics_url is None:
            raise NotFound("Triton's metrics are not configured.", hint="Set GATEWAY_TRITON_METRICS_URL.")
        try:
            async with httpx.AsyncClient(verify=self.tls or _TLS, timeout=RELAY_TIMEOUT_S) as client:
                answer = await client.get(self.triton_metrics_url)
        except httpx.HTTPError as exc:
            raise UpstreamUnavailable("Triton's metrics cannot be reached.") from exc
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


MAX_BYTES = 4 * 1024 * 1024
"""Of one export. Triton's largest has 512 spans of less than 1 KB."""
FORWARD_TIMEOUT_S = 5.0
_LIMITS = Limits(MAX_BYTES, 8 * MAX_BYTES)
_OWN_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceRoutes:
    """Keeps the spans of explained requests. ``collector_url``: also gets every export unchanged; None: no collector.

    Triton has one address for its spans. With a collector the gateway stands in front of it.
    """

    store: ExplainStore
    collector_url: str | None

    def router(self) -> APIRouter:
        return router_of(post={"/v1/traces": self.receive})

    async def receive(self, request: Request) -> Response:
        """Triton waits for the answer before its next export, so there are never many at the same time."""
        exchange = exchange_of(request)
        body = await read_json(exchange, _LIMITS)
        if self.store.wants_spans():
            try:
                self.store.add(await off_loop(spans_in, body, exchange))
            except NotSpans as exc:
                raise InvalidJson("The body is not an OTLP/JSON export of traces.") from exc
        if self.collector_url is not None:
            await _forward(self.collector_url, bytes(body), request.headers)
        return JsonResponse({})


async def _forward(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Raises UpstreamUnavailable; Triton then drops the spans, as it does for a collector that fails."""
    passed = {name: value for name, value in headers.items() if name not in _OWN_HEADERS}
    try:
        async with httpx.AsyncClient(verify=_TLS, timeout=FORWARD_TIMEOUT_S) as client:
            answer = await client.post(url, content=body, headers=passed)
            answer.raise_for_status()
    except httpx.HTTPError as exc:
        _log.warning("the collector did not take Triton's spans: %s", type(exc).__name__)
        raise UpstreamUnavailable("The collector did not take the spans.") from exc
