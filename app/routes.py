"""Every address of the gateway, what answers there, and the applications of the main and the admin port."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.middleware import Middleware
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from app.admission.keys import FollowedKeys
from app.api.bodies import Limits
from app.api.call import Inference
from app.api.downloads import ImageDownloads
from app.api.endpoint import Answering, Application, BrowserRules, Cors, Endpoint, EndpointGroup, Found, Layer
from app.api.exchange import ByteBudget, Exchange, JsonResponse
from app.api.oip import oip_operations as of_oip
from app.api.oip.oip_endpoints import OipEndpoints, error_response, generate_error_response, stream_error_response
from app.api.openai import openai_operations as of_openai
from app.api.openai.embeddings import EmbeddingsRoute
from app.api.openai.requests import OpenAIModels, openai_error_response
from app.api.openai.text_routes import ChatRoute, CompletionsRoute
from app.api.openapi import (
    API_PAGE,
    CONSOLE,
    PAGE_HEADERS,
    Documents,
    Operation,
    json_answer,
    pages_of_docs,
    show_errors,
)
from app.api.pipelines import pipeline_operations as of_pipelines
from app.api.pipelines.catalog_endpoints import CatalogEndpoints, FindingList, PipelineList
from app.api.pipelines.pipeline_endpoints import PipelineEndpoints
from app.api.probes import Liveness, Probes, Processes, Readiness, triton_metrics
from app.api.streaming import TRANSPORT as WEBSOCKET
from app.check import live_findings
from app.core.errors import UpstreamUnavailable
from app.core.inference import TensorMemory
from app.observability.metrics import Statistics, statistics_of
from app.settings import Settings
from app.streams.store import StreamStore
from app.triton.health.health import TritonHealth, needs_restart

get, post, delete = (partial(Endpoint, method) for method in ("GET", "POST", "DELETE"))
DIALECTS = ("pipelines", "oip", "openai")
OPENAI_ADDRESSES = (
    *("models", "completions", "chat/", "embeddings"),
    # Without a route: a client of OpenAI can read the error.
    *("responses", "conversations", "images", "audio", "moderations", "files", "uploads", "batches", "fine_tuning"),
    *("vector_stores", "assistants", "threads", "realtime", "videos"),
)
"""Where errors have OpenAI's form, without /v1/."""
"""In the order of /docs. Also the names in the ``dialects`` of keys."""


@dataclass(slots=True)
class Gateway:
    """The parts of one gateway."""

    inference: Inference
    store: StreamStore | None
    """None if resumable streams are off."""
    limits: Limits
    tensor_memory: TensorMemory | None = None
    """Shared with Triton; None without shared memory."""
    triton_metrics: Answering = triton_metrics
    health: Mapping[str, TritonHealth] = field(default_factory=dict)
    """By address."""
    keys: FollowedKeys | None = None
    """None if no keys are required."""
    layers: Sequence[Layer] = ()
    page: Collector | None = None
    """The metrics of all processes that serve the API; None if this process is the only one."""
    browser_rules: BrowserRules | None = None
    """None if every host and every page may send requests."""
    downloads: ImageDownloads | None = None
    """None if images cannot be given by their addresses."""
    settings: Settings = field(default_factory=Settings)

    def show_load(self) -> None:
        """Brings the gauges of admission and of kept streams up to date."""
        self.inference.show_load()
        if self.store is not None:
            self.inference.metrics.kept_streams.set(self.store.usage.streams)
            self.inference.metrics.kept_stream_bytes.set(self.store.usage.size)

    @property
    def metrics_page(self) -> Collector:
        return self.page or self.inference.metrics.registry

    async def metrics(self, _exchange: Exchange, _found: Found) -> Response:
        self.show_load()
        return Response(generate_latest(self.metrics_page), media_type=CONTENT_TYPE_LATEST)

    async def statistics(self) -> Statistics:
        self.show_load()
        return statistics_of(self.metrics_page)


def create_app(gateway: Gateway, *, admin_port: int) -> Application:
    settings, origins = gateway.settings, gateway.settings.cors_origins
    hint = "GET /docs lists the addresses." if settings.docs else "GET /v1/pipelines lists the pipelines."
    elsewhere = f"The admin port, {admin_port}, serves the metrics."
    inference, keys, layers = gateway.inference, gateway.keys, gateway.layers
    probes = health(Probes(inference.catalog, inference.workload, keys=keys))
    groups = [
        _pipelines(gateway),
        _oip(gateway),
        _openai(gateway),
        *(group for layer in layers for group in layer.groups),
        probes,
    ]
    documents = Documents(groups, layers, inference.catalog, needs_keys=keys is not None)
    groups.append(pages(documents, gateway))
    routes: list[BaseRoute] = [each.route(keys, group.dialect) for group in groups for each in group.endpoints]
    routes += pages_of_docs() if settings.docs else []
    routes += [Mount("/console", CONSOLE)] if settings.console else []
    cors = None
    if origins:
        read = [*settings.cors_headers, *(name for layer in layers for name in layer.headers)]
        exposed = [name for layer in layers for name in layer.answer_headers]
        cors = partial(Cors, origins=origins, headers=read, exposed=exposed)
    return Application(
        routes,
        inference,
        ByteBudget(gateway.limits.max_bytes_in_flight, gateway.tensor_memory),
        {"": hint, "/metrics": elsewhere, "/metrics/triton": elsewhere},
        error_forms=[form for group in groups for form in group.error_forms],
        rules=gateway.browser_rules,
        cors=cors,
    )


def create_admin_app(gateway: Gateway, *, api_port: int, processes: Processes | None = None) -> Application:
    """``processes``: all that serve the API; None if this process is the only one."""
    hint = f"This is the admin port. The API, its documentation and the console are on port {api_port}."
    inference = gateway.inference
    probes = Probes(inference.catalog, inference.workload, lambda: needs_restart(gateway.health), processes)
    endpoints = [
        *health(probes).endpoints,
        get("/health/triton", probes.triton),
        get("/metrics", gateway.metrics),
        get("/metrics/triton", gateway.triton_metrics),
        *(endpoint for layer in gateway.layers for endpoint in layer.admin_endpoints),
    ]
    routes = [each.route() for each in endpoints]
    budget = ByteBudget(gateway.limits.max_bytes_in_flight, gateway.tensor_memory)
    return Application(routes, inference, budget, {"": hint}, rules=gateway.browser_rules)


def _pipelines(gateway: Gateway) -> EndpointGroup:
    inference, limits = gateway.inference, gateway.limits
    find = partial(live_findings, inference.catalog)
    catalog = CatalogEndpoints(inference, limits, gateway.layers, gateway.statistics, find)
    pipelines = PipelineEndpoints(inference, limits, gateway.layers, gateway.store, gateway.settings.cors_origins)
    # Samples show the scheme that the caller used. Nothing else needs the headers of a proxy.
    proxied = [Middleware(ProxyHeadersMiddleware, trusted_hosts=os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))]
    listed = json_answer("The pipelines", PipelineList)
    statistics = json_answer("The numbers of each pipeline", Statistics)
    findings = json_answer("The findings", FindingList)
    down = (UpstreamUnavailable,)
    endpoints = [
        post("/v1/pipelines/{name}", pipelines.run_pipeline, of_pipelines.run, "unary"),
        post("/v1/pipelines/{name}/stream", pipelines.stream_pipeline, of_pipelines.stream, "stream"),
        get("/v1/pipelines/{name}/session", pipelines.open_socket, None, WEBSOCKET),
        get("/v1/pipelines", catalog.list_pipelines, Operation("list_pipelines", "catalog", {200: listed}, down)),
        get("/v1/pipelines/{name}", catalog.get_pipeline, of_pipelines.describe, middleware=proxied),
        get("/v1/pipelines/{name}/examples/{example}", catalog.get_example, of_pipelines.example),
        get("/v1/statistics", catalog.statistics, Operation("statistics", "catalog", {200: statistics})),
        get("/v1/findings", catalog.findings, Operation("findings", "catalog", {200: findings}, down)),
        post("/v1/streams", pipelines.start_stream, of_pipelines.start_stream),
        get("/v1/streams/{id}", pipelines.read_stream, of_pipelines.READ_STREAM, key="optional"),
        delete("/v1/streams/{id}", pipelines.delete_stream, of_pipelines.DELETE_STREAM, key="optional"),
    ]
    return EndpointGroup(endpoints, of_pipelines.tags_of, dialect="pipelines")


def _oip(gateway: Gateway) -> EndpointGroup:
    oip = OipEndpoints(gateway.inference, gateway.limits)
    endpoints = [
        get("/v2", oip.server, of_oip.SERVER),
        get("/v2/health/live", oip.live, of_oip.LIVE, key="ignored"),
        get("/v2/health/ready", oip.ready, of_oip.READY, key="ignored"),
        get("/v2/models/stats", oip.all_statistics, of_oip.ALL_STATISTICS),
        post("/v2/repository/index", oip.index, of_oip.INDEX),
    ]
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        endpoints += [
            post(f"{model}/infer", oip.infer, of_oip.infer, "unary"),
            post(f"{model}/generate", oip.generate, of_oip.generate, "unary", generate_error_response),
            post(f"{model}/generate_stream", oip.generate_stream, of_oip.stream, "stream", stream_error_response),
            get(model, oip.document("metadata"), of_oip.METADATA),
            get(f"{model}/ready", oip.model_ready, of_oip.MODEL_READY),
            get(f"{model}/config", oip.document("config"), of_oip.CONFIG),
            get(f"{model}/stats", oip.document("stats"), of_oip.STATISTICS),
        ]
    return EndpointGroup(endpoints, of_oip.tags_of, of_oip.ERRORS, "oip", [("/v2", error_response)])


def _openai(gateway: Gateway) -> EndpointGroup:
    inference, limits = gateway.inference, gateway.limits
    models, chat = OpenAIModels(inference.catalog), ChatRoute(inference, limits, gateway.downloads)
    completions, embeddings = CompletionsRoute(inference, limits), EmbeddingsRoute(inference, limits)
    endpoints = [
        post("/v1/chat/completions", chat.post, of_openai.chat, "unary"),
        post("/v1/completions", completions.post, of_openai.completions, "unary"),
        post("/v1/embeddings", embeddings.post, of_openai.embeddings, "unary"),
        get("/v1/models", models.list_models, of_openai.LIST_MODELS),
        get("/v1/models/{name}", models.get_model, of_openai.GET_MODEL),
    ]
    forms = [(f"/v1/{beginning}", openai_error_response) for beginning in OPENAI_ADDRESSES]
    return EndpointGroup(endpoints, of_openai.tags_of, of_openai.ERRORS, "openai", forms)


def health(probes: Probes) -> EndpointGroup:
    not_ready = "Triton or a required pipeline is not ready, or the gateway is draining"
    live = {200: json_answer("The gateway answers", Liveness)}
    ready = {
        200: json_answer("Every required pipeline can be called", Readiness),
        503: json_answer(not_ready, Readiness),
    }
    endpoints = [
        get("/health/live", probes.live, Operation("live", "health", live), key="ignored"),
        get("/health/ready", probes.ready, Operation("ready", "health", ready), key="ignored"),
    ]
    return EndpointGroup(endpoints, lambda _visible: {"health": "For probes"})


def pages(documents: Documents, gateway: Gateway) -> EndpointGroup:
    """The pages for people."""

    async def settings(_exchange: Exchange, _found: Found) -> Response:
        return JsonResponse({"may_load": gateway.settings.console_load}, headers=PAGE_HEADERS)

    async def to_docs(_exchange: Exchange, _found: Found) -> Response:
        return RedirectResponse("/docs")

    of_docs = [
        get("/openapi.json", documents.openapi),
        get("/docs", API_PAGE, key="ignored"),
        get("/docs/errors", show_errors, key="ignored"),
        get("/docs/errors/{code}", show_errors, key="ignored"),
    ]
    of_console = [
        get("/", CONSOLE.page("index.html"), key="ignored"),
        get("/console/settings", settings, key="ignored"),
    ]
    has_docs = gateway.settings.docs
    front = of_console if gateway.settings.console else [get("/", to_docs, key="ignored")] if has_docs else []
    return EndpointGroup([*(of_docs if has_docs else []), *front])
