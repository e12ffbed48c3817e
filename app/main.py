"""Creates the applications of the main and the admin port, and connects their routes with their dependencies."""

import ssl
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Mount

from app.admission.admission import WHOLE, Share
from app.admission.keys import FollowedKeys
from app.api.bodies import Limits
from app.api.call import Inference
from app.api.downloads import ImageDownloads
from app.api.endpoint import Application, BrowserRules, Cors, Layer
from app.api.exchange import ByteBudget
from app.api.openapi import CONSOLE, DOCS, Documents
from app.api.probes import MetricsPages, Probes, Processes
from app.core.inference import TensorMemory
from app.observability.metrics import Statistics, statistics_of
from app.routes import admin, dialects_of, health, pages
from app.streams.store import StreamStore
from app.triton.health.health import HealthByAddress


@dataclass(slots=True)
class Gateway:
    """The parts of one gateway."""

    inference: Inference
    store: StreamStore | None
    """None if resumable streams are off."""
    limits: Limits
    tensor_memory: TensorMemory | None = None
    """Shared with Triton; None without shared memory."""
    triton_metrics_url: str | None = None
    triton_metrics_tls: ssl.SSLContext | None = None
    health: HealthByAddress = field(default_factory=HealthByAddress)
    """The health of each Triton."""
    keys: FollowedKeys | None = None
    """None if no keys are required."""
    layers: Sequence[Layer] = ()
    page: Collector | None = None
    """The metrics of all processes that serve the API; None if this process is the only one."""
    browser_rules: BrowserRules | None = None
    """None if every host and every page may send requests."""
    share: Share = WHOLE
    downloads: ImageDownloads | None = None
    """None if images cannot be given by their addresses."""
    cors_origins: Collection[str] = ()
    """Of the pages that may read answers and open WebSockets."""
    cors_headers: Collection[str] = ()
    """Headers of requests that these pages may send besides the usual ones."""
    has_docs: bool = True
    has_console: bool = True
    may_load: bool = False
    """Whether the console offers to send many requests."""

    def show_load(self) -> None:
        """Brings the gauges of admission and of kept streams up to date."""
        self.inference.show_load()
        if self.store is not None:
            self.inference.metrics.kept_streams.set(self.store.usage.streams)
            self.inference.metrics.kept_stream_bytes.set(self.store.usage.size)

    def byte_budget(self) -> ByteBudget:
        return ByteBudget(self.limits.max_bytes_in_flight, self.tensor_memory)

    @property
    def metrics_page(self) -> Collector:
        return self.page or self.inference.metrics.registry

    async def statistics(self) -> Statistics:
        self.show_load()
        return statistics_of(self.metrics_page)


def create_app(gateway: Gateway, *, admin_port: int) -> Application:
    has_docs, origins = gateway.has_docs, gateway.cors_origins
    hint = "GET /docs lists the addresses." if has_docs else "GET /v1/pipelines lists the pipelines."
    elsewhere = f"The admin port, {admin_port}, serves the metrics."
    inference, keys, layers = gateway.inference, gateway.keys, gateway.layers
    probes = health(Probes(inference.catalog, inference.workload, keys=keys))
    groups = [*dialects_of(gateway), *(group for layer in layers for group in layer.groups), probes]
    documents = Documents(groups, layers, inference.catalog, needs_keys=keys is not None)
    groups.append(pages(documents, gateway))
    routes: list[BaseRoute] = [each.route(keys, group.dialect) for group in groups for each in group.endpoints]
    routes += [Mount("/docs/assets", DOCS)] if has_docs else []
    routes += [Mount("/console", CONSOLE)] if gateway.has_console else []
    cors = None
    if origins:
        read = [*gateway.cors_headers, *(name for layer in layers for name in layer.headers)]
        exposed = [name for layer in layers for name in layer.answer_headers]
        cors = partial(Cors, origins=origins, headers=read, exposed=exposed)
    return Application(
        routes,
        inference,
        gateway.byte_budget(),
        {"": hint, "/metrics": elsewhere, "/metrics/triton": elsewhere},
        error_forms=[form for group in groups for form in group.error_forms],
        rules=gateway.browser_rules,
        cors=cors,
    )


def create_admin_app(gateway: Gateway, *, api_port: int, processes: Processes | None = None) -> Application:
    """``processes``: all that serve the API; None if this process is the only one."""
    hint = f"This is the admin port. The API, its documentation and the console are on port {api_port}."
    inference = gateway.inference
    probes = Probes(inference.catalog, inference.workload, lambda: gateway.health.needs_restart, processes)
    url, tls = gateway.triton_metrics_url, gateway.triton_metrics_tls
    endpoints = [
        *admin(probes, MetricsPages(gateway.metrics_page, gateway.show_load, url, tls)),
        *(endpoint for layer in gateway.layers for endpoint in layer.admin_endpoints),
    ]
    routes = [each.route() for each in endpoints]
    return Application(routes, inference, gateway.byte_budget(), {"": hint}, rules=gateway.browser_rules)
