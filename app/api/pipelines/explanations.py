"""``/v1/requests/{id}/explain``: where the time of a request went."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.exchange import exchange_of
from app.api.explaining import Explaining
from app.api.responses import JsonResponse
from app.api.routing import Route
from app.domain.errors import UnknownRequest
from app.observability.explain.waterfall import explanation_of


class ExplanationRoutes:
    """``explaining``: None if no request may be explained."""

    def __init__(self, explaining: Explaining | None) -> None:
        self._explaining = explaining

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/requests", route_class=Route)
        router.add_api_route("/{request_id}/explain", self.explain)
        return router

    async def explain(self, request_id: str, request: Request) -> Response:
        if self._explaining is None:
            raise UnknownRequest(
                "This gateway explains no requests.", hint="For development, set GATEWAY_EXPLAIN=true."
            )
        found = await self._explaining.explanations.find(exchange_of(request).caller.id, request_id)
        if found is None:
            raise UnknownRequest("No explained request of this caller has this id.")
        return JsonResponse(explanation_of(found))
