"""The read-only routes: health, metadata, configurations, statistics and the index of exposed models."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from app import __version__
from app.api.access import allows_model, check_model
from app.api.bodies import receive_body
from app.api.exchange import exchange_of
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.oip.routes import MODEL, VERSION, version_of
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.domain.engine import Document
from app.domain.errors import InvalidInput, ModelNotReady, UnknownModel

EXTENSIONS = [
    "classification",
    "model_repository",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "sequence",
    "schedule_policy",
    "statistics",
    "generate",
]


class _Wanted(msgspec.Struct):
    ready: bool = False


class ModelRoutes:
    def __init__(self, inference: Inference, limits: Limits) -> None:
        self._inference = inference
        self._limits = limits

    def router(self) -> APIRouter:
        router = APIRouter(route_class=Route)
        router.add_api_route("/v2", self.server)
        router.add_api_route("/v2/repository/index", self.index, methods=["POST"])
        router.add_api_route("/v2/models/stats", self.all_statistics)
        for path in (MODEL, VERSION):
            router.add_api_route(path, self.metadata)
            router.add_api_route(f"{path}/ready", self.model_ready)
            router.add_api_route(f"{path}/config", self.config)
            router.add_api_route(f"{path}/stats", self.statistics)
        return router

    def health_router(self) -> APIRouter:
        router = APIRouter(prefix="/v2/health", route_class=Route)
        router.add_api_route("/live", self.live)
        router.add_api_route("/ready", self.ready)
        return router

    async def server(self, _request: Request) -> Response:
        return JsonResponse({"name": "triton-gateway", "version": __version__, "extensions": EXTENSIONS})

    async def live(self, _request: Request) -> Response:
        """Triton sends no body, but KServe's client requires the JSON object that KServe's servers send."""
        return JsonResponse({"live": True})

    async def ready(self, _request: Request) -> Response:
        """Answers 200 or 400, as Triton does."""
        inference = self._inference
        is_ready = inference.catalog.is_ready and not inference.workload.is_shutting_down
        return JsonResponse({"ready": is_ready}, 200 if is_ready else 400)

    async def model_ready(self, request: Request) -> Response:
        """Triton answers 400 both for models that are not ready and for unknown models."""
        model = request.path_params["model"]
        check_model(exchange_of(request), self._inference.catalog, model)
        is_exposed = model in self._inference.catalog.exposed
        if is_exposed and await self._is_ready(model, version_of(request.path_params)):
            return JsonResponse({"name": model, "ready": True})
        return JsonResponse({"error": "Model version not ready"}, 400)

    async def _is_ready(self, model: str, version: str) -> bool:
        try:
            return await self._inference.engine.model_ready(model, version)
        except ModelNotReady:
            return False

    async def metadata(self, request: Request) -> Response:
        return await self._document(request, "metadata")

    async def config(self, request: Request) -> Response:
        return await self._document(request, "config")

    async def statistics(self, request: Request) -> Response:
        return await self._document(request, "stats")

    async def _document(self, request: Request, document: Document) -> Response:
        model = request.path_params["model"]
        check_model(exchange_of(request), self._inference.catalog, model)
        if model not in self._inference.catalog.exposed:
            raise UnknownModel.named(model)
        version = version_of(request.path_params)
        return JsonResponse(await self._inference.engine.document(document, model, version))

    async def all_statistics(self, request: Request) -> Response:
        stats = await self._inference.engine.document("stats", "")
        return JsonResponse({"model_stats": self._visible(request, stats["model_stats"])})

    async def index(self, request: Request) -> Response:
        """Omits Triton's reasons, which may contain paths."""
        wanted = _wanted_of(await receive_body(exchange_of(request), self._limits))
        models = await self._inference.engine.models()
        rows = [
            {"name": each.name, "version": each.version, "state": "READY" if each.ready else "UNAVAILABLE"}
            for each in models
            if each.ready or not wanted.ready
        ]
        return JsonResponse(self._visible(request, rows))

    def _visible(self, request: Request, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Those of models that are exposed, and that the key of the request allows."""
        key, catalog = exchange_of(request).key, self._inference.catalog
        exposed = (row for row in rows if row["name"] in catalog.exposed)
        return [row for row in exposed if allows_model(key, catalog, row["name"])]


def _wanted_of(body: memoryview) -> _Wanted:
    """Raises InvalidInput."""
    try:
        return msgspec.json.decode(body, type=_Wanted) if body else _Wanted()
    except (ValueError, RecursionError) as exc:
        raise InvalidInput('The body must be empty or {"ready": <boolean>}.') from exc
