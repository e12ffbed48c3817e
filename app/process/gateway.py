"""Opens the gateway: the Triton that it calls, its catalog, and the background work that keeps both up to date.

``open_gateway`` connects the parts. The background work follows the files and the models, and logs limits, scopes of
API keys and models that need the operator's attention.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from app import __version__
from app.admission.admission import Admission
from app.admission.keys import FollowedKeys
from app.api.browser_guard import BrowserRules, host_of
from app.api.call import Inference
from app.api.downloads import ImageDownloads
from app.api.explain.explanations import Explanations
from app.api.limits import Limits
from app.api.request_layer import Layer
from app.check import log_findings
from app.coalescing.shared_calls import CoalescingEngine, SharedCallMetrics
from app.config.document import ConfigError
from app.core.engine import InferenceServer
from app.core.loopback import is_loopback
from app.core.text import nearest
from app.main import Gateway
from app.observability.metrics import Metrics
from app.observability.tracing import Tracer
from app.pipelines.catalog import Catalog
from app.pipelines.compile import CompileContext
from app.pipelines.run import Canceller
from app.process.credential_settings import metrics_tls_of
from app.process.open_files import connections_within, watch_open_files
from app.process.supervision import Supervisor
from app.process.tritons import Servers, Triton
from app.routes import DIALECTS
from app.settings import Settings
from app.streams.store import StreamStore
from app.triton.grpc_errors import is_dead_process

_log = logging.getLogger(__name__)


def unknown_scopes(catalog: Catalog, keys: FollowedKeys) -> Iterator[str]:
    """Names in the scopes of API keys that this gateway does not serve: a misspelled name allows nothing.

    Without ``gateway.yaml`` there are none, because models come and go.
    """
    served = [*catalog.entries, *catalog.oip_models.names]
    for key in keys.ring.keys if catalog.file is not None else ():
        for name in sorted((key.pipelines or set()) - set(served)):
            known = nearest(name, served)
            yield f"the API key '{key.caller.id}' allows '{name}', which this gateway does not serve{known}"


def exceeded_limits(catalog: Catalog, keys: FollowedKeys | None, processes: int) -> Iterator[str]:
    """Limits of requests that are smaller than the number of processes: together these exceed them."""
    limits = [
        (f"limits.{key} of the pipeline '{name}'", getattr(entry.spec.limits, key, None))
        for name, entry in catalog.entries.items()
        for key in ("in_flight", "per_key")
    ]
    for each in () if keys is None else keys.ring.keys:
        limits.append((f"limits.in_flight of the API key '{each.caller.id}'", each.caller.limits.in_flight))
    each_runs = f"but each of the {processes} processes runs at least 1 request: together they run up to {processes}"
    return (f"{limit} is {total}, {each_runs}" for limit, total in limits if total is not None and total < processes)


FILE_POLL_S = 1.0
REFRESH_S = 2.0
REFRESH_UNREADY_S = 0.25


class ModelCheck:
    """Logs once what the linter finds in Triton's models, as soon as they are there."""

    def __init__(self, catalog: Catalog, engine: InferenceServer, *, is_done: bool = False) -> None:
        """``is_done``: another process logs the findings."""
        self._catalog = catalog
        self._engine = engine
        self._is_done = is_done

    async def run_once(self) -> None:
        if self._catalog.triton_is_up and self._catalog.is_compiled and not self._is_done:
            self._is_done = True
            await log_findings(self._engine, self._catalog.file)


async def keep_fresh(
    catalog: Catalog, check: ModelCheck, metrics: Metrics, keys: FollowedKeys | None = None, processes: int = 1
) -> None:
    """Keeps the catalog and the gauges about it up to date until it is cancelled; no exception ends it.

    Follows the files and the models separately: a Triton that does not answer delays no reload. ``processes``: how many
    share each limit.
    """

    def measured() -> None:
        if not metrics.has_addresses:
            metrics.triton_up.set(catalog.triton_is_up)
        metrics.config_reload_failed.set(catalog.reload_failed or (keys is not None and keys.reload_failed))
        metrics.model_ready.clear()
        for model, is_ready in catalog.models.items():
            metrics.model_ready.labels(model).set(is_ready)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_follow_files(catalog, keys, processes, measured))
            group.create_task(_follow_models(catalog, check, measured))
    finally:
        catalog.stop()


async def _follow_files(
    catalog: Catalog, keys: FollowedKeys | None, processes: int, measured: Callable[[], None]
) -> None:
    logged: set[str] = set()
    while True:
        if keys is not None:
            await _contained(keys.follow)
        await _contained(catalog.follow_file)
        found = [*(unknown_scopes(catalog, keys) if keys else ()), *exceeded_limits(catalog, keys, processes)]
        for text in (text for text in found if text not in logged):
            logged.add(text)
            _log.warning(text)
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


POLL_S = 1.0


async def adopt_when_made(catalog: Catalog, path: Path) -> None:
    """Adopts a gateway.yaml that is made after the start.

    Waits for the file if the catalog follows none, and then until it is cancelled.
    """
    problem = ""
    while catalog.path is None:
        if await asyncio.to_thread(path.exists):
            try:
                await catalog.adopt_file(path)
                _log.info("%s is used from now on", path)
            except ConfigError as exc:
                if str(exc) != problem:
                    _log.error("%s cannot be used; every ready model stays served: %s", path, exc)
                problem = str(exc)
        await asyncio.sleep(POLL_S)
    await asyncio.Event().wait()


@asynccontextmanager
async def open_gateway(
    settings: Settings, triton: Triton, store: StreamStore | None, tracer: Tracer, supervisor: Supervisor
) -> AsyncIterator[Gateway]:
    """``store``: None if resumable streams are off.

    Raises ConfigError if gateway.yaml does not fit the models of a Triton that already answers.
    """
    metrics = Metrics(__version__, has_addresses=not triton.is_single)
    path, is_first = settings.api_keys_file, triton.share.number == 1
    keys = None if path is None else FollowedKeys(path, DIALECTS)
    servers = Servers(settings, triton, metrics, tracer, supervisor)
    async with servers.opened() as calls:
        catalog = await _catalog_of(settings, triton, calls.engine)
        servers.declarations.catalog = catalog
        check = ModelCheck(catalog, calls.engine, is_done=not is_first)
        await check.run_once()
        layers = [Explanations(settings.receives_spans, settings.explain, settings.traces_url).layer()]
        inference = _inference_of(servers, calls.engine, catalog, layers)
        processes = triton.share.of if is_first else 1
        async with (
            supervisor.running("catalog refresh", keep_fresh(catalog, check, metrics, keys, processes)),
            supervisor.running("watch of open files", watch_open_files(metrics.out_of_files.inc)),
            supervisor.running("wait for gateway.yaml", adopt_when_made(catalog, settings.default_config)),
        ):
            yield Gateway(
                inference,
                store,
                limits_of(settings),
                None if calls.shared_memory is None else calls.shared_memory.bodies,
                triton.metrics_url,
                metrics_tls_of(settings),
                servers.health,
                keys,
                layers,
                browser_rules=browser_rules_of(settings),
                share=triton.share,
                downloads=ImageDownloads(settings.image_hosts) if settings.image_hosts else None,
            )
        await inference.canceller.close()


def _inference_of(servers: Servers, engine: InferenceServer, catalog: Catalog, layers: Sequence[Layer]) -> Inference:
    triton, metrics = servers.triton, servers.metrics
    admission = Admission(triton.share, len(triton.addresses))
    return Inference(
        CoalescingEngine(
            engine, admission.calls_of, SharedCallMetrics(metrics.counter, metrics.histogram), is_dead_process
        ),
        catalog,
        metrics,
        Canceller(engine),
        servers.tracer,
        admission=admission,
        admitted=[layer.admitted for layer in layers if layer.admitted is not None],
    )


async def _catalog_of(settings: Settings, triton: Triton, engine: InferenceServer) -> Catalog:
    """Raises ConfigError."""
    key = settings.early_exit_key.encode() if settings.early_exit_key else None
    catalog = Catalog(
        engine,
        settings.config_path,
        CompileContext(
            timeout_s=settings.timeout_s,
            early_exit_key=key,
            exposes_errors=settings.expose_model_errors == "true",
            exposes_oip_errors=settings.expose_model_errors != "false",
            tokenizers=settings.tokenizers,
        ),
        triton.grpc_url,
    )
    if settings.config_path is None and triton.share.number == 1:
        looked_for = settings.default_config.absolute()
        _log.info("there is no %s: every ready model is served under its own name, until the file exists", looked_for)
    catalog.load_file()
    await catalog.refresh()
    if catalog.complaints:
        raise ConfigError("\n".join(catalog.complaints))
    return catalog


def limits_of(settings: Settings) -> Limits:
    return Limits(
        settings.max_body_bytes,
        settings.max_bytes_in_flight,
        connections_within(settings.max_connections),
        ping_s=settings.ping_s,
        send_s=settings.send_timeout_s,
    )


def browser_rules_of(settings: Settings) -> BrowserRules | None:
    """None if keys protect the gateway, or if other machines can call it anyway, unless the operator lists hosts."""
    is_open = settings.api_keys_file is None and is_loopback(settings.host)
    if not (is_open or settings.allowed_hosts):
        return None
    hosts, origins = frozenset(map(host_of, settings.allowed_hosts)), frozenset(settings.cors_origins)
    return BrowserRules(hosts, origins, refuses_cross_site=is_open)
