"""The Open Inference Protocol over HTTP, as Triton implements it: ``/v2``. The pipelines' rules do not apply."""

from app.api.dialect import Dialect
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.oip.calls import ModelCalls
from app.api.oip.errors import error_response
from app.api.oip.openapi import described
from app.api.oip.routes import GenerateRoutes, InferRoutes, ModelRoutes


def oip_dialect(inference: Inference, limits: Limits) -> Dialect:
    calls, models = ModelCalls(inference), ModelRoutes(inference, limits)
    return Dialect(
        name="oip",
        routers=[models.router()],
        keyless_routers=[models.health_router()],
        short_routes=[*InferRoutes(calls, limits).short_routes(), *GenerateRoutes(calls, limits).short_routes()],
        described=lambda key: described(inference.catalog, key),
        error_forms=[("/v2", error_response)],
    )
