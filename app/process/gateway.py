"""Opens the gateway: the Triton that it calls, its catalog, and the background work that keeps both up to date.

``open_gateway`` connects the parts. The background work follows the files and the models, and logs limits, scopes of
API keys and models that need the operator's attention.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from app import __version__
from app.admission.admission import Admission, Share
from app.admission.keys import FollowedKeys
from app.api.bodies import Limits
from app.api.call import Inference
from app.api.downloads import ImageDownloads
from app.api.endpoint import BrowserRules, Layer, host_of
from app.api.explain.explanations import Explanations
from app.api.idempotency.idempotency_layer import Idempotency
from app.api.probes import triton_metrics
from app.api.sessions.session_layer import Sessions
from app.check import log_findings
from app.coalescing.shared_calls import CoalescingEngine, SharedCallMetrics
from app.config.document import ConfigError
from app.core.engine import InferenceServer
from app.core.text import is_loopback, nearest
from app.observability.metrics import Metrics
from app.observability.tracing import Tracer
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import CompileContext
from app.process.supervision import Supervisor, connections_within, watch_open_files
from app.process.tritons import Servers, Triton
from app.routes import DIALECTS, Gateway
from app.settings import DEFAULT_CONFIG, Settings, credentials_of
from app.steps.steps_engine import StepsEngine
from app.streams.store import StreamStore
from app.triton.grpc_errors import is_dead_process

_log = logging.getLogger(__name__)


def complaints(catalog: Catalog, keys: FollowedKeys | None, processes: int) -> Iterator[str]:
    """What does not fit: scopes of API keys that allow nothing, and limits that all processes together exceed.

    Without ``gateway.yaml`` every name in a scope fits, because models come and go.
    """
    limits = [
        (f"limits.{key} of the pipeline '{name}'", getattr(entry.spec.limits, key, None))
        for name, entry in catalog.entries.items()
        for key in ("in_flight", "per_key")
    ]
    served = [*catalog.entries, *catalog.oip_models.names]
    for key in () if keys is None else keys.keys:
        limits.append((f"limits.in_flight of the API key '{key.id}'", key.limits.in_flight))
        for name in sorted(set(key.pipelines or ()) - set(served)) if catalog.file is not None else ():
            known = nearest(name, served)
            yield f"the API key '{key.id}' allows '{name}', which this gateway does not serve{known}"
    each_runs = f"but each of the {processes} processes runs at least 1 request: together they run up to {processes}"
    yield from (
        f"{limit} is {total}, {each_runs}" for limit, total in limits if total is not None and total < processes
    )


FILE_POLL_S = 1.0
REFRESH_S = 2.0
REFRESH_UNREADY_S = 0.25


@dataclass(slots=True)
class Refresh:
    """Keeps the catalog and the gauges about it up to date.

    ``late_file``: the gateway.yaml that is adopted if it is made after the start. ``processes``: how many share each
    limit. ``has_checked``: whether the linter's findings in Triton's models are logged, maybe by another process.
    """

    catalog: Catalog
    metrics: Metrics
    keys: FollowedKeys | None = None
    late_file: Path | None = None
    processes: int = 1
    has_checked: bool = False
    _logged: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Runs until it is cancelled; no exception ends it.

        Follows the files and the models separately: a Triton that does not answer delays no reload.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_files())
                group.create_task(self._follow_models())
        finally:
            self.catalog.stop()

    async def _follow_files(self) -> None:
        while True:
            if self.keys is not None:
                await _contained(self.keys.follow)
            await _contained(self._adopt_late_file if self.catalog.path is None else self.catalog.follow_file)
            for text in complaints(self.catalog, self.keys, self.processes):
                self._log_once(logging.WARNING, text)
            self._show()
            await asyncio.sleep(FILE_POLL_S)

    async def _adopt_late_file(self) -> None:
        path = self.late_file
        if path is not None and await asyncio.to_thread(path.exists):
            try:
                await self.catalog.adopt_file(path)
                _log.info("%s is used from now on", path)
            except ConfigError as exc:
                self._log_once(logging.ERROR, f"{path} cannot be used; every ready model stays served: {exc}")

    async def _follow_models(self) -> None:
        while True:
            await _contained(self.catalog.follow_models)
            await _contained(self.check_models)
            await _contained(self.catalog.warm_up)
            self._show()
            await asyncio.sleep(REFRESH_S if self.catalog.is_settled else REFRESH_UNREADY_S)

    async def check_models(self) -> None:
        """Logs once what the linter finds in Triton's models, as soon as they are there."""
        if self.catalog.triton_is_up and self.catalog.is_compiled and not self.has_checked:
            self.has_checked = True
            await log_findings(self.catalog.engine, self.catalog.file)

    def _show(self) -> None:
        catalog, metrics = self.catalog, self.metrics
        if not metrics.has_addresses:
            metrics.triton_up.set(catalog.triton_is_up)
        metrics.config_reload_failed.set(catalog.reload_failed or (self.keys is not None and self.keys.has_failed))
        metrics.model_ready.clear()
        for model, is_ready in catalog.models.items():
            metrics.model_ready.labels(model).set(is_ready)

    def _log_once(self, level: int, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.log(level, text)


async def _contained(step: Callable[[], Awaitable[None]]) -> None:
    try:
        await step()
    except Exception:
        _log.exception("a part of the refresh failed; it is tried again")


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
    async with servers.opened() as engine:
        catalog = await _catalog_of(settings, triton, engine)
        admission = Admission(triton.share, len(triton.addresses))
        series = functools.cache(metrics.steps.labels)  # the labels are those of gateway.yaml
        steps = catalog.runs = StepsEngine(
            engine,
            lambda step, deadline: admission.queue_of(
                step.config.name, step.capacity, catalog.oip_models.in_flight.get(step.config.name)
            ).of_steps.enter_again(deadline),
            lambda *labels: series(*labels).inc(),
        )
        servers.declarations.catalog = catalog
        processes, late_file = triton.share.of if is_first else 1, settings.default_config
        refresh = Refresh(catalog, metrics, keys, late_file, processes, has_checked=not is_first)
        await refresh.check_models()
        shared_calls = SharedCallMetrics(metrics.counter, metrics.histogram)
        inference = Inference(
            CoalescingEngine(steps, admission.calls_of, shared_calls, is_dead_process),
            catalog,
            metrics,
            tracer,
            admission=admission,
            direct=engine,
        )
        limits = Limits(
            settings.max_body_bytes,
            settings.max_bytes_in_flight,
            connections_within(settings.max_connections),
            ping_s=settings.ping_s,
            send_s=settings.send_timeout_s,
        )
        layers, files = layers_of(settings, inference, limits, triton.share), credentials_of(settings).tls
        tls = None if files is None else files.context("http/1.1")
        inference.admitted = [layer.admitted for layer in layers if layer.admitted is not None]
        async with (
            supervisor.running("catalog refresh", refresh.run()),
            supervisor.running("watch of open files", watch_open_files(metrics.out_of_files.inc)),
        ):
            yield Gateway(
                inference,
                store,
                limits,
                None if servers.shared_memory is None else servers.shared_memory.bodies,
                functools.partial(triton_metrics, url=triton.metrics_url, tls=tls),
                servers.health,
                keys,
                layers,
                browser_rules=browser_rules_of(settings),
                downloads=ImageDownloads(settings.image_hosts) if settings.image_hosts else None,
                settings=settings,
            )
        await inference.cancellations.close()


def layers_of(settings: Settings, inference: Inference, limits: Limits, share: Share) -> list[Layer]:
    """The features of requests. Each has a folder of its own, and this is the only list of them."""
    explained = Explanations(
        is_on=settings.receives_spans, for_everyone=settings.explain, collector_url=settings.traces_url
    )
    return [Idempotency(), explained, Sessions(inference, limits, share)]


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
    if triton.share.number == 1:
        default = settings.default_config
        unused = " (./gateway.yaml is used with --config gateway.yaml)" if DEFAULT_CONFIG.exists() else ""
        hint = unused if default is None else f", until {default.absolute()} exists"
        none = f"none; serving every ready model under its own name{hint}"
        _log.info("gateway.yaml: %s", settings.config_path or none)
        if settings.api_keys_file is None and not is_loopback(settings.host):
            text = (
                "GATEWAY_HOST=%s without GATEWAY_API_KEYS_FILE: everyone who reaches the port can call every pipeline"
            )
            _log.warning(text, settings.host)
    catalog.load_file()
    await catalog.refresh()
    if catalog.complaints:
        raise ConfigError("\n".join(catalog.complaints))
    return catalog


def browser_rules_of(settings: Settings) -> BrowserRules | None:
    """None if keys protect the gateway, or if other machines can call it anyway, unless the operator lists hosts."""
    is_open = settings.api_keys_file is None and is_loopback(settings.host)
    if not (is_open or settings.allowed_hosts):
        return None
    hosts, origins = frozenset(map(host_of, settings.allowed_hosts)), frozenset(settings.cors_origins)
    return BrowserRules(hosts, origins, refuses_cross_site=is_open)
