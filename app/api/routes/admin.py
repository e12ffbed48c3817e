"""The metrics on the admin port: the gateway's, and Triton's, which are relayed.

The receiver of Triton's spans on the admin port: OTLP over HTTP, as JSON.
"""

import logging
import ssl
from collections.abc import Callable, Mapping

import httpx
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from app.api.bodies import off_loop, read_json
from app.api.exchange import exchange_of
from app.api.limits import Limits
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.core.errors import InvalidJson, NotFound, UpstreamUnavailable
from app.observability.explain.spans import NotSpans, spans_in
from app.observability.explain.store import ExplainStore

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


MAX_BYTES = 4 * 1024 * 1024
"""Of one export. Triton's largest has 512 spans of less than 1 KB."""
FORWARD_TIMEOUT_S = 5.0
_OWN_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}

_log = logging.getLogger(__name__)


class TraceRoutes:
    """Keeps the spans of explained requests. ``collector_url``: also gets every export unchanged; None: no collector.

    Triton has one address for its spans. With a collector the gateway stands in front of it.
    """

    def __init__(self, store: ExplainStore, collector_url: str | None) -> None:
        self._store = store
        self._collector_url = collector_url
        self._limits = Limits(MAX_BYTES, 8 * MAX_BYTES)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/traces", route_class=Route)
        router.add_api_route("", self.receive, methods=["POST"])
        return router

    async def receive(self, request: Request) -> Response:
        """Triton waits for the answer before its next export, so there are never many at the same time."""
        exchange = exchange_of(request)
        body = await read_json(exchange, self._limits)
        if self._store.wants_spans():
            try:
                self._store.add(await off_loop(spans_in, body))
            except NotSpans as exc:
                raise InvalidJson("The body is not an OTLP/JSON export of traces.") from exc
        if self._collector_url is not None:
            await _forward(self._collector_url, bytes(body), request.headers)
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
