"""``/v1/completions``, ``/v1/chat/completions``, ``/v1/embeddings`` and ``/v1/models``."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.dialect import ShortRoute
from app.api.exchange import exchange_of
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.openai.embeddings import EmbeddingsRoute
from app.api.openai.errors import openai_error_response
from app.api.openai.requests import check_model, models_of
from app.api.openai.text import CHAT, COMPLETIONS, TextRoute
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.core.errors import UnknownPipeline
from app.pipelines.catalog import Catalog

OWNER = "triton-gateway"


class OpenAIModelRoutes:
    """The pipelines that declare ``openai:``, as models."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/models", route_class=Route)
        router.add_api_route("", self.list_models)
        router.add_api_route("/{name}", self.get_model)
        return router

    async def list_models(self, request: Request) -> Response:
        names = models_of(self._catalog, exchange_of(request).key)
        return JsonResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def get_model(self, name: str, request: Request) -> Response:
        check_model(exchange_of(request), self._catalog, name)
        if self._catalog.pipeline(name).openai is None:
            raise UnknownPipeline(
                f"Pipeline '{name}' does not declare `openai:`.", hint="GET /v1/models lists the models."
            )
        return JsonResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}


def short_routes(inference: Inference, limits: Limits) -> list[ShortRoute]:
    endpoints = {
        "/v1/completions": TextRoute(inference, limits, COMPLETIONS).post,
        "/v1/chat/completions": TextRoute(inference, limits, CHAT).post,
        "/v1/embeddings": EmbeddingsRoute(inference, limits).post,
    }
    return [ShortRoute(path, endpoint, openai_error_response) for path, endpoint in endpoints.items()]
