"""The dialect of the pipelines: ``/v1/pipelines`` and ``/v1/streams``, with the names of ``gateway.yaml``."""

from app.api.dialect import Dialect
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.pipelines.openapi import described
from app.api.pipelines.routes import FindingsSource, PipelineRoutes, StatisticsSource
from app.api.pipelines.streams import StreamRoutes
from app.streams.store import StreamStore


def pipelines_dialect(
    inference: Inference,
    store: StreamStore | None,
    limits: Limits,
    statistics: StatisticsSource,
    findings: FindingsSource,
) -> Dialect:
    """``store``: None if resumable streams are off."""
    pipelines = PipelineRoutes(inference, limits, statistics, findings)
    streams = StreamRoutes(inference, store, limits)
    return Dialect(
        name="pipelines",
        routers=[pipelines.router(), streams.router()],
        bearer_routers=[streams.router_by_id()],
        short_routes=pipelines.short_routes(),
        described=lambda key: described(inference.catalog, key),
    )
