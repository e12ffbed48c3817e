"""OpenAI's dialect: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/embeddings``.

It serves the pipelines that declare ``openai:``. The model's id is the pipeline's name.
"""

from app.api.dialect import Dialect
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.openai.errors import openai_error_response
from app.api.openai.openapi import described
from app.api.openai.routes import OpenAIRoutes

_BEGINNINGS = ("/v1/models", "/v1/completions", "/v1/chat/", "/v1/embeddings")


def openai_dialect(inference: Inference, limits: Limits) -> Dialect:
    routes = OpenAIRoutes(inference, limits)
    return Dialect(
        name="openai",
        routers=[routes.router()],
        short_routes=routes.short_routes(),
        described=lambda key: described(inference.catalog, key),
        error_forms=[(beginning, openai_error_response) for beginning in _BEGINNINGS],
    )
