"""What a platform asks: liveness and readiness, on both ports, and metrics on the admin port, also those of Triton."""

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx
from msgspec import Struct, to_builtins
from starlette.responses import Response

from app.admission.keys import FollowedKeys
from app.api.endpoint import Found
from app.api.exchange import Exchange, JsonResponse, Workload, key_of
from app.core.errors import NotFound, Unauthenticated, UpstreamUnavailable
from app.pipelines.catalog import Catalog, VersionState

RELAY_TIMEOUT_S = 5.0
_OWN_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}
_TLS = httpx.create_ssl_context()
"""Created once: reading the certificates takes about 20 ms, which would delay every stream."""

_log = logging.getLogger(__name__)


class Processes(Protocol):
    """All processes that serve the API, including this process."""

    @property
    def is_ready(self) -> bool:
        """Whether enough of them are ready, and all that accept connections are ready."""

    @property
    def states(self) -> Mapping[str, str]:
        """Maps the number of each to ``starting``, ``not_ready`` or ``ready``."""

    @property
    def needs_restart(self) -> bool:
        """Whether one of them found that Triton must be restarted."""


class Liveness(Struct):
    status: Literal["live"] = "live"


class Readiness(Struct, kw_only=True):
    status: Literal["ready", "not_ready", "draining"]
    triton: Literal["up", "down"]
    pipelines: Mapping[str, VersionState]
    state_detail: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Probes:
    """``triton_is_stuck``: whether Triton is live but needs a restart to answer; used on the admin port only.

    ``keys``: names pipelines only to callers whose key allows them; None: to every caller.
    ``processes``: None if this process is the only one that serves the API; used on the admin port only.
    """

    catalog: Catalog
    workload: Workload
    triton_is_stuck: Callable[[], bool] | None = None
    processes: Processes | None = None
    keys: FollowedKeys | None = None

    async def live(self, _exchange: Exchange, _found: Found) -> Response:
        """Whether the gateway answers.

        For a liveness probe. It does not ask Triton.
        """
        return JsonResponse(Liveness())

    async def ready(self, exchange: Exchange, _found: Found) -> Response:
        """Whether the pipelines can be called.

        For a readiness probe. The answer has the state of each pipeline, with 200 and with 503.
        """
        is_draining, processes, catalog = self.workload.is_shutting_down, self.processes, self.catalog
        entries = catalog.entries
        if self.keys is not None:
            try:
                key = key_of(exchange, self.keys)
            except Unauthenticated:
                key = None
            entries = {name: entry for name, entry in entries.items() if key is not None and key.allows(name)}
        is_ready = catalog.is_ready and not is_draining and (processes is None or processes.is_ready)
        readiness = Readiness(
            status="ready" if is_ready else "draining" if is_draining else "not_ready",
            triton="up" if catalog.triton_is_up else "down",
            pipelines={name: entry.state for name, entry in entries.items()},
            state_detail={name: entry.state_detail for name, entry in entries.items() if entry.state_detail},
        )
        members: dict[str, Any] = to_builtins(readiness)  # the admin port has further ones
        if processes is not None:
            members["workers"] = processes.states
        if self.triton_is_stuck is not None and (states := catalog.engine.states()):
            absences = {name: catalog.absences(entry.spec) for name, entry in catalog.entries.items()}
            members |= {"tritons": states, "missing_at": {name: each for name, each in absences.items() if each}}
        return JsonResponse(members, 200 if is_ready else 503)

    async def triton(self, _exchange: Exchange, _found: Found) -> Response:
        """503 only while Triton is live, but all models or one model answer only after a restart of Triton."""
        is_stuck = self.triton_is_stuck is not None and self.triton_is_stuck()
        is_stuck |= self.processes is not None and self.processes.needs_restart
        return JsonResponse({"triton": "stuck" if is_stuck else "not_stuck"}, 503 if is_stuck else 200)


async def triton_metrics(
    _exchange: Exchange, _found: Found, url: str | None = None, tls: ssl.SSLContext | None = None
) -> Response:
    """Triton's own page. ``tls``: for an https address. Raises NotFound or UpstreamUnavailable."""
    if url is None:
        raise NotFound("Triton's metrics are not configured.", hint="Set GATEWAY_TRITON_METRICS_URL.")
    try:
        async with httpx.AsyncClient(verify=tls or _TLS, timeout=RELAY_TIMEOUT_S) as client:
            answer = await client.get(url)
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
