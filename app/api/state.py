"""What the routes share: put into the application's state once, when it is wired."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import HTTPConnection

from app.domain.engine import Engine
from app.domain.errors import Draining
from app.observability.metrics import Metrics
from app.observability.record import RequestRecord
from app.observability.tracing import NoTracer, Tracer
from app.pipelines.cancellation import Canceller
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline
from app.streams.store import StreamStore
from app.streams.stream import Stream


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int
    body_s: float = 30.0
    """For the whole body to arrive."""
    ping_s: float = 15.0
    send_s: float = 10.0
    """For a client to take what is sent to it."""


@dataclass(slots=True)
class Gateway:
    engine: Engine
    catalog: Catalog
    metrics: Metrics
    canceller: Canceller
    limits: Limits
    store: StreamStore
    triton_metrics_url: str | None = None
    tracer: Tracer = field(default_factory=NoTracer)
    is_draining: bool = False
    streams: set[Stream] = field(default_factory=set)
    in_flight: int = 0
    """Unary requests under way."""

    def admit(self, name: str, record: RequestRecord, transport: str) -> Pipeline:
        """The pipeline, with the request counted under its name. Raises Draining, UnknownPipeline or ModelNotReady."""
        record.transport = transport
        pipeline = self.catalog.pipeline(name)
        record.pipeline = name
        if self.is_draining:
            raise Draining("The gateway is shutting down; send the request again.")
        return pipeline

    @contextmanager
    def counted(self, pipeline: str) -> Iterator[None]:
        """Around a unary request."""
        gauge = self.metrics.in_flight.labels(pipeline)
        gauge.inc()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            gauge.dec()

    def start_stream(self, stream: Stream, pipeline: str) -> None:
        """Starts it and keeps it until its terminal event is written."""
        active = self.metrics.active_streams.labels(pipeline)

        def forget(_task: asyncio.Task[None]) -> None:
            self.streams.discard(stream)
            active.dec()

        self.streams.add(stream)
        active.inc()
        stream.start().add_done_callback(forget)

    @property
    def is_ready(self) -> bool:
        return self.catalog.is_ready and not self.is_draining

    async def end_streams(self, within_s: float) -> None:
        """Lets streams finish for a while, then ends those that are left with a farewell."""
        if self.streams:
            await asyncio.wait([asyncio.ensure_future(stream.ended()) for stream in self.streams], timeout=within_s)
        for stream in set(self.streams):
            stream.end(Draining("The gateway is shutting down."))
            await stream.ended()


def gateway_of(connection: HTTPConnection) -> Gateway:
    return cast("Gateway", connection.app.state.gateway)


def record_of(connection: HTTPConnection) -> RequestRecord:
    return cast("RequestRecord", connection.scope["state"]["record"])
