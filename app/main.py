"""Creates the applications of the main and the admin port, and connects their routes with their dependencies."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from app import console
from app.admission.keys import FollowedKeys
from app.api import documentation
from app.api.access import AccessCheck
from app.api.body_memory import ByteBudget
from app.api.browser_guard import BrowserGuard, BrowserRules
from app.api.call import Inference
from app.api.cors import Cors
from app.api.documentation import Documents
from app.api.downloads import ImageDownloads
from app.api.exchange import EntryPoint
from app.api.failures import ErrorForms, FailureMiddleware
from app.api.limits import Limits
from app.api.metrics_pages import MetricsPages
from app.api.probes import Probes, Processes
from app.api.request_layer import Layer
from app.core.inference import TensorMemory
from app.core.share import WHOLE, Share
from app.observability.statistics import Statistics, statistics_of
from app.routes import admin, dialects_of, health
from app.routes import pages as people
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

    def show_load(self) -> None:
        """Brings the gauges of admission and of kept streams up to date."""
        self.inference.show_load()
        if self.store is not None:
            self.inference.metrics.show_kept(self.store.usage.streams, self.store.usage.size)

    @property
    def metrics_page(self) -> Collector:
        return self.page or self.inference.metrics.registry

    async def statistics(self) -> Statistics:
        self.show_load()
        return statistics_of(self.metrics_page)


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages for people. ``load``: whether the console offers to send many requests."""

    docs: bool = True
    console: bool = True
    load: bool = False


EVERY_PAGE = Pages()


def create_app(
    gateway: Gateway,
    *,
    admin_port: int,
    cors_origins: tuple[str, ...] = (),
    cors_headers: tuple[str, ...] = (),
    pages: Pages = EVERY_PAGE,
) -> EntryPoint:
    elsewhere = f"The admin port, {admin_port}, serves the metrics."
    hint = "GET /docs lists the addresses." if pages.docs else "GET /v1/pipelines lists the pipelines."
    inference, keys, layers = gateway.inference, gateway.keys, gateway.layers
    access = None if keys is None else AccessCheck(keys)
    probes = health(Probes(inference.catalog, inference.workload, access=access))
    groups = [*dialects_of(gateway, cors_origins), *(group for layer in layers for group in layer.groups), probes]
    documents = Documents(groups, layers, inference.catalog, needs_keys=keys is not None)
    groups.append(people(documents, has_docs=pages.docs, has_console=pages.console, may_load=pages.load))
    forms = ErrorForms([form for group in groups for form in group.error_forms])
    routes = [each.route(access, group.dialect) for group in groups for each in group.endpoints]
    mounts = [*([documentation.assets] if pages.docs else []), *([console.files] if pages.console else [])]
    hints = dict.fromkeys(("/metrics", "/metrics/triton"), elsewhere)
    app: ASGIApp = FailureMiddleware(_router([*routes, *mounts]), forms, hint, hints)
    if cors_origins:
        read = [name for layer in layers for name in layer.headers]
        exposed = [name for layer in layers for name in layer.answer_headers]
        app = Cors(app, cors_origins, (*read, *cors_headers), exposed)
    return _entry_point(app, gateway, forms)


def create_admin_app(gateway: Gateway, *, api_port: int, processes: Processes | None = None) -> EntryPoint:
    """``processes``: all that serve the API; None if this process is the only one."""
    hint = f"This is the admin port. The API, its documentation and the console are on port {api_port}."
    forms, inference = ErrorForms(), gateway.inference
    probes = Probes(inference.catalog, inference.workload, lambda: gateway.health.needs_restart, processes)
    url, tls = gateway.triton_metrics_url, gateway.triton_metrics_tls
    endpoints = [
        *admin(probes, MetricsPages(gateway.metrics_page, gateway.show_load, url, tls)),
        *(endpoint for layer in gateway.layers for endpoint in layer.admin_endpoints),
    ]
    return _entry_point(FailureMiddleware(_router([each.route() for each in endpoints]), forms, hint), gateway, forms)


def _entry_point(app: ASGIApp, gateway: Gateway, forms: ErrorForms) -> EntryPoint:
    inference = gateway.inference
    if gateway.browser_rules is not None:
        app = BrowserGuard(app, gateway.browser_rules, forms)
    budget = ByteBudget(gateway.limits.max_bytes_in_flight, gateway.tensor_memory)
    return EntryPoint(app, inference.metrics, inference.workload, inference.tracer, budget)


def _router(routes: Sequence[BaseRoute]) -> APIRouter:
    return APIRouter(routes=list(routes), redirect_slashes=False)
