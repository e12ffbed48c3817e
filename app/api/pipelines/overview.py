"""``/v1/statistics`` and ``/v1/findings``: how the pipelines are doing. The console draws both."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.admission.keys import Key
from app.api.access import allows_pipeline
from app.api.exchange import exchange_of
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.domain.fresh import Fresh
from app.observability.metrics import DURATION_BOUNDS_S
from app.observability.statistics import PipelineStatistics, Statistics
from app.pipelines.catalog import Catalog
from app.pipelines.linter.findings import Finding

StatisticsSource = Callable[[], Awaitable[Statistics]]
"""Returns the numbers of all workers."""
FindingsSource = Callable[[], Awaitable[Sequence[Finding]]]
"""Returns what the linter finds in the models as they are now. Raises GatewayError."""

STATISTICS_S = 0.5
"""How long statistics are sent again without reading the metrics, which takes 12 ms for 80 series of ten pipelines."""
FINDINGS_S = 5.0
"""How long findings are sent again without a new check, which asks Triton for every model."""


class OverviewRoutes:
    def __init__(self, catalog: Catalog, statistics: StatisticsSource, findings: FindingsSource) -> None:
        self._catalog = catalog
        self._statistics = Fresh(statistics, STATISTICS_S)
        self._findings = Fresh(findings, FINDINGS_S)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", route_class=Route)
        router.add_api_route("/statistics", self.statistics)
        router.add_api_route("/findings", self.findings)
        return router

    async def statistics(self, request: Request) -> Response:
        """``time_s`` is for differences only: two answers give the rates between them."""
        key, known = exchange_of(request).key, await self._statistics.current()
        allowed = [name for name in self._catalog.entries if allows_pipeline(key, name)]
        pipelines = {name: known.pipelines.get(name) or PipelineStatistics() for name in allowed}
        return JsonResponse({"time_s": known.time_s, "bounds_s": DURATION_BOUNDS_S, "pipelines": pipelines})

    async def findings(self, request: Request) -> Response:
        """Texts name gateway.yaml and samples without the folder, because answers contain no paths of the machine."""
        allowed, file = _Allowed(self._catalog, exchange_of(request).key), self._catalog.file
        folder = "" if file is None else f"{file.path.parent}/"
        found = [_described(finding, folder) for finding in await self._findings.current() if allowed.includes(finding)]
        return JsonResponse({"findings": found})


class _Allowed:
    """The findings that a caller may see: those about the pipelines of its key, and about their models."""

    def __init__(self, catalog: Catalog, key: Key | None) -> None:
        self._key = key
        entries = [entry for name, entry in catalog.entries.items() if allows_pipeline(key, name)]
        self._models = {entry.spec.model for entry in entries}
        self._models |= {model for entry in entries if entry.pipeline for model in entry.pipeline.graph.models}

    def includes(self, finding: Finding) -> bool:
        if self._key is None or self._key.pipelines is None:
            return True
        if finding.pipeline is not None:
            return self._key.allows(finding.pipeline)
        return finding.model in self._models


def _described(finding: Finding, folder: str) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "code": finding.code,
        "pipeline": finding.pipeline,
        "model": finding.model,
        "step": finding.step,
        "tensor": finding.tensor,
        "text": finding.text.replace(folder, "") if folder else finding.text,
    }
