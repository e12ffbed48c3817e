"""Creates the applications of the main and the admin port, and connects their routes with their dependencies."""

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

from fastapi import Depends, FastAPI, Request
from prometheus_client.registry import Collector
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app import console
from app.admission.keys import FollowedKeys
from app.api.access import AccessCheck
from app.api.body_memory import ByteBudget
from app.api.browser_guard import BrowserGuard, BrowserRules
from app.api.cors import Cors
from app.api.dialect import Dialect, Layer, Services, ShortPath, add_routes
from app.api.downloads import ImageDownloads
from app.api.exchange import EntryPoint
from app.api.failures import ErrorForms, add_failure_handling
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.routes import docs
from app.api.routes.admin import MetricsRoutes
from app.api.routes.health import HealthRoutes, Processes
from app.api.routing import Route
from app.check import live_findings
from app.core.inference import TensorMemory
from app.core.share import WHOLE, Share
from app.observability.statistics import Statistics, statistics_of
from app.streams.store import StreamStore
from app.triton.health.health import HealthByAddress

DIALECTS = ("pipelines", "oip", "openai")
"""The folders of ``app/api`` with a dialect, in the order of /docs; also the names in the ``dialects`` of keys."""


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
    inference, keys = gateway.inference, gateway.keys
    findings = partial(live_findings, inference.catalog)
    services = Services(
        inference,
        gateway.limits,
        gateway.store,
        gateway.statistics,
        findings,
        gateway.share,
        gateway.downloads,
        cors_origins,
        gateway.layers,
    )
    dialects = {name: _dialect(name, services) for name in DIALECTS}
    forms = ErrorForms([form for dialect in dialects.values() for form in dialect.error_forms])
    app = _bare_app(hint, dict.fromkeys(("/metrics", "/metrics/triton"), elsewhere), forms)
    access = None if keys is None else AccessCheck(keys)
    app.include_router(HealthRoutes(inference.catalog, inference.workload, access=access).router())
    for name, dialect in dialects.items():
        add_routes(app, dialect, access and access.for_dialect(name))
    required = [] if access is None else [Depends(access.required)]
    for layer in gateway.layers:
        app.include_router(layer.router, dependencies=required)
    if pages.docs:
        app.include_router(docs.pages())
        described = docs.DocumentRoute(
            dialects, gateway.layers, inference.catalog, needs_keys=keys is not None
        ).router()
        app.include_router(described, dependencies=required)
        app.router.routes.append(docs.assets)
    if pages.console:
        app.include_router(console.router(may_load=pages.load))
        app.router.routes.append(console.files)
    elif pages.docs:
        app.add_api_route("/", _front, include_in_schema=False)
    # Samples show the scheme of a trusted proxy; inference uses neither the scheme nor the client's address.
    trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=trusted)
    short_path: ASGIApp = ShortPath(app)
    if cors_origins:
        of_layers = (layer.header["name"] for layer in gateway.layers)
        short_path = Cors(short_path, cors_origins, (*of_layers, *cors_headers))
    return _entry_point(short_path, gateway, forms)


def _dialect(name: str, services: Services) -> Dialect:
    dialect: Dialect = import_module(f"app.api.{name}.routes").dialect(services)
    return dialect


def create_admin_app(gateway: Gateway, *, api_port: int, processes: Processes | None = None) -> EntryPoint:
    """``processes``: all that serve the API; None if this process is the only one."""
    hint = f"This is the admin port. The API, its documentation and the console are on port {api_port}."
    forms = ErrorForms()
    app = _bare_app(hint, {}, forms)
    inference = gateway.inference
    health = HealthRoutes(inference.catalog, inference.workload, lambda: gateway.health.needs_restart, processes)
    app.include_router(health.router())
    url, tls = gateway.triton_metrics_url, gateway.triton_metrics_tls
    app.include_router(MetricsRoutes(gateway.metrics_page, gateway.show_load, url, tls).router())
    for layer in gateway.layers:
        app.include_router(layer.admin_router)
    return _entry_point(app, gateway, forms)


def _entry_point(app: ASGIApp, gateway: Gateway, forms: ErrorForms) -> EntryPoint:
    inference = gateway.inference
    if gateway.browser_rules is not None:
        app = BrowserGuard(app, gateway.browser_rules, forms)
    budget = ByteBudget(gateway.limits.max_bytes_in_flight, gateway.tensor_memory)
    return EntryPoint(app, inference.metrics, inference.workload, inference.tracer, budget)


def _bare_app(hint: str, hint_by_path: dict[str, str], forms: ErrorForms) -> FastAPI:
    """Creates an app without FastAPI's documentation, which the gateway replaces. ``hint``: for a 404."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = Route
    add_failure_handling(app, forms, hint, hint_by_path)
    return app


async def _front(_request: Request) -> Response:
    return RedirectResponse("/docs")
