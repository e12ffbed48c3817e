"""``GET /v1/pipelines/{pipeline}/examples/{example}``: the declared requests of a pipeline, with their files."""

import asyncio
import logging

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.access import check_pipeline
from app.api.exchange import exchange_of
from app.api.limits import Limits
from app.api.routing import Route
from app.domain.errors import UnknownExample
from app.domain.nearest import nearest
from app.pipelines.catalog import Catalog
from app.pipelines.declared import body_of, declared_requests
from app.pipelines.pipeline import Pipeline

_log = logging.getLogger(__name__)


class ExampleRoutes:
    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._limits = limits

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/pipelines", route_class=Route)
        router.add_api_route("/{name}/examples/{example}", self.get_example)
        return router

    async def get_example(self, name: str, example: str, request: Request) -> Response:
        """The answer counts as a body in memory, because it has the size of one."""
        exchange = exchange_of(request)
        check_pipeline(exchange, self._catalog, name)
        body = await asyncio.to_thread(self._body, self._catalog.pipeline(name), example)
        exchange.hold(len(body))
        return Response(body, media_type="application/json")

    def _body(self, pipeline: Pipeline, example: str) -> bytes:
        """Reads the files again each time, so that a changed file needs no reload. Raises UnknownExample."""
        declared, max_bytes = declared_requests(pipeline.spec), self._limits.max_body_bytes
        if example not in declared:
            raise UnknownExample(f"The pipeline has no such example{nearest(example, list(declared))}")
        try:
            body = body_of(pipeline, declared[example], self._catalog.folder, max_bytes)
        except (OSError, TypeError, ValueError) as exc:
            _log.warning("the example '%s' of pipeline '%s' cannot be sent: %s", example, pipeline.name, exc)
            raise UnknownExample("A file of this example cannot be read; see the log for the cause.") from exc
        if len(body) > max_bytes:
            raise UnknownExample("This example is larger than GATEWAY_MAX_BODY_BYTES, so it cannot be sent.")
        return body
