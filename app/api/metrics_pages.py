"""The admin port: metrics of the gateway, relayed metrics of Triton, and the forwarding of Triton's spans."""

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from app.api.endpoint import Found
from app.api.exchange import Exchange
from app.core.errors import NotFound, UpstreamUnavailable

RELAY_TIMEOUT_S = 5.0
_OWN_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}
_TLS = httpx.create_ssl_context()
"""Created once: reading the certificates takes about 20 ms, which would delay every stream."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MetricsPages:
    """``prepare`` is called before the page is made. ``triton_metrics_url``: Triton's own page, or None.

    ``tls``: for an https address.
    """

    page: Collector
    prepare: Callable[[], None]
    triton_metrics_url: str | None
    tls: ssl.SSLContext | None = None

    async def gateway_metrics(self, _exchange: Exchange, _found: Found) -> Response:
        self.prepare()
        return Response(generate_latest(self.page), media_type=CONTENT_TYPE_LATEST)

    async def triton_metrics(self, _exchange: Exchange, _found: Found) -> Response:
        if self.triton_metrics_url is None:
            raise NotFound("Triton's metrics are not configured.", hint="Set GATEWAY_TRITON_METRICS_URL.")
        try:
            async with httpx.AsyncClient(verify=self.tls or _TLS, timeout=RELAY_TIMEOUT_S) as client:
                answer = await client.get(self.triton_metrics_url)
        except httpx.HTTPError as exc:
            raise UpstreamUnavailable("Triton's metrics cannot be reached.") from exc
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


async def forward_spans(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Raises UpstreamUnavailable; Triton then drops the spans, as it does for a collector that fails."""
    passed = {name: value for name, value in headers.items() if name not in _OWN_HEADERS}
    try:
        async with httpx.AsyncClient(verify=_TLS, timeout=RELAY_TIMEOUT_S) as client:
            answer = await client.post(url, content=body, headers=passed)
            answer.raise_for_status()
    except httpx.HTTPError as exc:
        _log.warning("the collector did not take Triton's spans: %s", type(exc).__name__)
        raise UpstreamUnavailable("The collector did not take the spans.") from exc
