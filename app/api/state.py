"""The state that the routes share, created once when the application is wired."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import HTTPConnection

from app.api.workload import RequestWork, Workload
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
    max_bytes_in_flight: int = 256 * 1024 * 1024
    """For the bodies of all requests together."""
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
    triton_is_stuck: Callable[[], bool] = lambda: False
    is_draining: bool = False
    workload: Workload = field(default_factory=Workload)

    def admit(self, request: HTTPConnection, name: str, transport: str) -> Pipeline:
        """The pipeline. The request counts as work, under the pipeline's name, until its last byte is sent.

        Raises Draining, UnknownPipeline or ModelNotReady.
        """
        record = record_of(request)
        record.transport = transport
        pipeline = self.catalog.pipeline(name)
        record.pipeline = name
        self.begin(request)
        return pipeline

    def begin(self, request: HTTPConnection) -> None:
        """Counts the request as work until its last byte is sent. Raises Draining."""
        if self.is_draining:
            raise Draining("The gateway is shutting down; send the request again.")
        self.workload.add(work_of(request))

    @contextmanager
    def counted(self, pipeline: str) -> Iterator[None]:
        """Counts a unary request in the metrics for the duration of the block."""
        gauge = self.metrics.in_flight.labels(pipeline)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def start_stream(self, stream: Stream, pipeline: str) -> None:
        """Starts the stream, which counts as work until its terminal event is written."""
        active = self.metrics.active_streams.labels(pipeline)

        def forget(_task: asyncio.Task[None]) -> None:
            self.workload.remove(stream)
            active.dec()

        self.workload.add(stream)
        active.inc()
        stream.start().add_done_callback(forget)

    @property
    def is_ready(self) -> bool:
        return self.catalog.is_ready and not self.is_draining


def gateway_of(connection: HTTPConnection) -> Gateway:
    return cast("Gateway", connection.app.state.gateway)


def record_of(connection: HTTPConnection) -> RequestRecord:
    return cast("RequestRecord", connection.scope["state"]["record"])


def work_of(connection: HTTPConnection) -> RequestWork:
    return cast("RequestWork", connection.scope["state"]["work"])
