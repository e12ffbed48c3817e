"""The background work that keeps the catalog and the gauges about it up to date."""

import asyncio

from app.checking import log_findings
from app.domain.engine import Engine
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog, State

REFRESH_S = 2.0
REFRESH_UNREADY_S = 0.25


async def keep_fresh(catalog: Catalog, engine: Engine, metrics: Metrics) -> None:
    """Follows the models and the file until it is cancelled; checks the models once, before any pipeline is ready."""
    is_checked = False
    while True:
        await catalog.refresh()
        if catalog.is_compiled and not is_checked:
            await log_findings(engine, catalog.file)
            is_checked = True
        await catalog.warm_up()
        _measure(catalog, metrics)
        await asyncio.sleep(REFRESH_S if catalog.is_ready else REFRESH_UNREADY_S)


def _measure(catalog: Catalog, metrics: Metrics) -> None:
    metrics.triton_up.set(catalog.triton_is_up)
    metrics.config_reload_failed.set(catalog.reload_failed)
    for entry in catalog.entries.values():
        metrics.model_ready.labels(entry.spec.model).set(entry.state in {State.READY, State.WARMING})
