"""Liveness and readiness, on the main and the admin port."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.responses import JsonResponse
from app.api.routing import Route
from app.api.state import Gateway, gateway_of

router = APIRouter(prefix="/health", route_class=Route)
admin_router = APIRouter(prefix="/health", route_class=Route)


@router.get("/live")
async def live(_request: Request) -> Response:
    """The process answers; says nothing of Triton, so that a slow model load never restarts the gateway."""
    return JsonResponse({"status": "live"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Triton answers, every required pipeline is warm, and the gateway is not draining."""
    gateway = gateway_of(request)
    return JsonResponse(_readiness(gateway), 200 if gateway.is_ready else 503)


@admin_router.get("/triton")
async def triton(request: Request) -> Response:
    """503 only while Triton is stuck: live, but without an answer to any inference call. A restart ends that."""
    is_stuck = gateway_of(request).triton_is_stuck()
    return JsonResponse({"triton": "stuck" if is_stuck else "not_stuck"}, 503 if is_stuck else 200)


def _readiness(gateway: Gateway) -> dict[str, object]:
    entries = gateway.catalog.entries
    return {
        "status": "ready" if gateway.is_ready else "draining" if gateway.is_draining else "not_ready",
        "triton": "up" if gateway.catalog.triton_is_up else "down",
        "pipelines": {name: entry.state for name, entry in entries.items()},
        "state_detail": {name: entry.state_detail for name, entry in entries.items() if entry.state_detail},
    }
