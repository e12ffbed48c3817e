"""``/v1/completions``, ``/v1/chat/completions``, ``/v1/embeddings`` and ``/v1/models``."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.dialect import Dialect, Services, ShortRoute
from app.api.downloads import ImageDownloads
from app.api.exchange import exchange_of
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.openai.embeddings import EmbeddingsRoute
from app.api.openai.errors import openai_error_response
from app.api.openai.openapi import described
from app.api.openai.requests import checked_model, models_of
from app.api.openai.text import CHAT, COMPLETIONS, TextRoute
from app.api.responses import JsonResponse
from app.api.routing import router_of
from app.core.errors import UnknownPipeline

OWNER = "triton-gateway"


class OpenAIRoutes:
    """The pipelines that declare ``openai:``, as models."""

    def __init__(self, inference: Inference, limits: Limits, downloads: ImageDownloads | None) -> None:
        self._inference = inference
        self._downloads = downloads
        self._catalog = inference.catalog
        self._limits = limits
        self._created = int(time.time())

    def router(self) -> APIRouter:
        return router_of({"/v1/models": self.list_models, "/v1/models/{name}": self.get_model})

    def short_routes(self) -> list[ShortRoute]:
        endpoints = {
            "/v1/completions": TextRoute(self._inference, self._limits, COMPLETIONS).post,
            "/v1/chat/completions": TextRoute(self._inference, self._limits, CHAT, self._downloads).post,
            "/v1/embeddings": EmbeddingsRoute(self._inference, self._limits).post,
        }
        return [ShortRoute(path, endpoint, openai_error_response) for path, endpoint in endpoints.items()]

    async def list_models(self, request: Request) -> Response:
        self._catalog.check_known()
        names = models_of(self._catalog, exchange_of(request).key)
        return JsonResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def get_model(self, name: str, request: Request) -> Response:
        pipeline = checked_model(exchange_of(request), self._catalog, name)
        if self._catalog.pipeline(pipeline).openai is None:
            raise UnknownPipeline(
                f"Pipeline '{pipeline}' does not declare `openai:`.", hint="GET /v1/models lists the models."
            )
        return JsonResponse(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}


_BEGINNINGS = ("/v1/models", "/v1/completions", "/v1/chat/", "/v1/embeddings")


def dialect(services: Services) -> Dialect:
    routes = OpenAIRoutes(services.inference, services.limits, services.downloads)
    return Dialect(
        routers=[routes.router()],
        short_routes=routes.short_routes(),
        described=lambda key: described(services.inference.catalog, key),
        error_forms=[(beginning, openai_error_response) for beginning in _BEGINNINGS],
    )
