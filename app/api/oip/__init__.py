"""The Open Inference Protocol over HTTP, as Triton implements it: ``/v2``. The pipelines' rules do not apply."""

from app.api.dialect import Dialect
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.oip.errors import error_response
from app.api.oip.openapi import described
from app.api.oip.routes import OipRoutes


def oip_dialect(inference: Inference, limits: Limits) -> Dialect:
    routes = OipRoutes(inference, limits)
    return Dialect(
        name="oip",
        routers=[routes.router()],
        keyless_routers=[routes.health_router()],
        short_routes=routes.short_routes(),
        described=lambda key: described(inference.catalog, key),
        error_forms=[("/v2", error_response)],
    )
