"""The background work that keeps the catalog and the gauges about it up to date; no exception ends it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.admission.followed_keys import FollowedKeys
from app.checking import log_findings
from app.domain.engine import Engine
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.process.scopes import ScopeCheck
from app.process.small_shares import ShareCheck

FILE_POLL_S = 1.0
REFRESH_S = 2.0
REFRESH_UNREADY_S = 0.25

_log = logging.getLogger(__name__)


class ModelCheck:
    """Logs once what the linter finds in Triton's models, as soon as they are there."""

    def __init__(self, catalog: Catalog, engine: Engine, *, is_done: bool = False) -> None:
        """``is_done``: another process logs the findings."""
        self._catalog = catalog
        self._engine = engine
        self._is_done = is_done

    async def run_once(self) -> None:
        if self._catalog.triton_is_up and self._catalog.is_compiled and not self._is_done:
            self._is_done = True
            await log_findings(self._engine, self._catalog.file)


async def keep_fresh(
    catalog: Catalog,
    check: ModelCheck,
    metrics: Metrics,
    keys: FollowedKeys | None = None,
    shares: ShareCheck | None = None,
) -> None:
    """Follows the files and the models until it is cancelled: a Triton that does not answer delays no reload."""

    def measured() -> None:
        measure(catalog, metrics, keys)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_follow_files(catalog, keys, shares, measured))
            group.create_task(_follow_models(catalog, check, measured))
    finally:
        catalog.stop()


async def _follow_files(
    catalog: Catalog, keys: FollowedKeys | None, shares: ShareCheck | None, measured: Callable[[], None]
) -> None:
    scopes = None if keys is None else ScopeCheck(keys, catalog)
    while True:
        if keys is not None:
            await _contained(keys.follow)
        await _contained(catalog.follow_file)
        if scopes is not None:
            scopes.run()
        if shares is not None:
            shares.run()
        measured()
        await asyncio.sleep(FILE_POLL_S)


async def _follow_models(catalog: Catalog, check: ModelCheck, measured: Callable[[], None]) -> None:
    while True:
        await _contained(catalog.follow_models)
        await _contained(check.run_once)
        await _contained(catalog.warm_up)
        measured()
        await asyncio.sleep(REFRESH_S if catalog.is_settled else REFRESH_UNREADY_S)


async def _contained(step: Callable[[], Awaitable[None]]) -> None:
    try:
        await step()
    except Exception:
        _log.exception("a part of the refresh failed; it is tried again")


def measure(catalog: Catalog, metrics: Metrics, keys: FollowedKeys | None = None) -> None:
    if not metrics.has_addresses:
        metrics.triton_up.set(catalog.triton_is_up)
    metrics.config_reload_failed.set(catalog.reload_failed or (keys is not None and keys.reload_failed))
    metrics.model_ready.clear()
    for model, is_ready in catalog.models.items():
        metrics.model_ready.labels(model).set(is_ready)
