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
from app.domain.nearest import without_nearest
from app.observability.metrics import DURATION_BOUNDS_S
from app.observability.statistics import PipelineStatistics, Statistics
from app.pipelines.catalog import Catalog
from app.pipelines.linter.findings import Finding
from app.pipelines.linter.solutions import SOLUTION_BY_CODE

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
        found, key, file = await self._findings.current(), exchange_of(request).key, self._catalog.file
        view = _View(self._catalog, key, "" if file is None else f"{file.path.parent}/")
        return JsonResponse({"findings": [view.of(finding) for finding in found if view.includes(finding)]})


class _View:
    """What a caller may see of the findings: those about the pipelines of its key, and about their models.

    Texts name gateway.yaml and samples without their ``folder``, because answers contain no paths of the machine.
    For a key with a scope they suggest no names, which may be of other pipelines' models.
    """

    def __init__(self, catalog: Catalog, key: Key | None, folder: str) -> None:
        self._key = None if key is None or key.pipelines is None else key
        self._folder = folder
        entries = [entry for name, entry in catalog.entries.items() if allows_pipeline(key, name)]
        self._models = {entry.spec.model for entry in entries}
        self._models |= {model for entry in entries if entry.pipeline for model in entry.pipeline.graph.models}

    def includes(self, finding: Finding) -> bool:
        if self._key is None:
            return True
        if finding.pipeline is not None:
            return self._key.allows(finding.pipeline)
        return finding.model in self._models

    def of(self, finding: Finding) -> dict[str, Any]:
        text = finding.text.replace(self._folder, "") if self._folder else finding.text
        return {
            "severity": finding.severity,
            "code": finding.code,
            "pipeline": finding.pipeline,
            "model": finding.model,
            "step": finding.step,
            "tensor": finding.tensor,
            "text": text if self._key is None else without_nearest(text),
            "solution": SOLUTION_BY_CODE[finding.code],
        }
