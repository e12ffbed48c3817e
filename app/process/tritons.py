"""Opens the Tritons that the gateway calls, each with everything that belongs to its address.

``running_triton`` yields the Triton to call, and runs the embedded Triton for the duration of its block. ``Servers``
opens the calls. ``run_triton`` is the command ``triton-gateway triton``, which runs only the wheel's Triton.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from app.admission.admission import WHOLE, Share
from app.core.engine import CallObserver, InferenceServer
from app.core.errors import GatewayError
from app.launcher.embedded_triton import EmbeddedTriton
from app.launcher.launch import EmbeddedOptions, Ports
from app.observability.log import LoggedCall, say
from app.observability.metrics import CountedCall, Metrics
from app.observability.tracing import Tracer, traced_call
from app.pipelines.catalog import Catalog
from app.pipelines.examples import body_of
from app.pipelines.pipeline import Pipeline
from app.process.supervision import ShutdownRequested, Supervisor, url_of
from app.settings import PREFIX, Settings, credentials_of
from app.shared_memory.leases import SharedMemory
from app.triton.cancellation import PacedCancels
from app.triton.connect import MAX_MESSAGE_BYTES, addresses_of, is_name, open_transport, registry_of
from app.triton.fleet.balancer import Balancer, TritonServer
from app.triton.fleet.pool import ServerPool
from app.triton.health.health import DEAD, ModelDeclaration, ModelFault, TritonHealth
from app.triton.health.health_watch import Canary, HealthWatch, Restart, Turn
from app.triton.repository import served_repository
from app.triton.triton_engine import TritonEngine

EXPORT_DELAY_MS = 100
"""The longest delay before Triton sends its spans. The default of 5 s is too long for a user who waits."""


@dataclass(frozen=True, slots=True)
class Triton:
    """How the gateway reaches its Triton."""

    grpc_url: str
    """One address or several, as in ``GATEWAY_TRITON_URL``."""
    metrics_url: str | None
    allows_fast_pings: bool
    restart: Restart | None = None
    """Restarts the embedded Triton. None if the gateway did not start Triton."""
    share: Share = WHOLE
    """The part of this process in the calls of the gateway."""
    turn: Turn = nullcontext
    """The turn of this process to repair Triton."""

    @property
    def is_single(self) -> bool:
        """Whether there is one address, which is not a DNS name."""
        return len(self.addresses) == 1 and not is_name(self.addresses[0])

    @property
    def addresses(self) -> tuple[str, ...]:
        return addresses_of(self.grpc_url)


@asynccontextmanager
async def running_triton(settings: Settings, supervisor: Supervisor, admin_port: int) -> AsyncIterator[Triton]:
    """Yields the Triton to call. An embedded Triton runs for the duration of the block.

    The embedded Triton sends its spans to the admin port if the gateway receives them. Its models read settings from
    the environment (names as in model_kit).
    """
    if not settings.embedded:
        yield Triton(settings.triton_url, settings.triton_metrics_url, allows_fast_pings=False)
        return
    key = {"EARLY_EXIT_KEY": settings.early_exit_key} if settings.early_exit_key else {}
    options = EmbeddedOptions(
        settings.embedded_repository,
        settings.models_venv,
        environment=os.environ | {f"{PREFIX}LOG_TENSORS": settings.log_tensors} | key,
        traces_url=f"{url_of(settings.host, admin_port)}/v1/traces" if settings.receives_spans else settings.traces_url,
        traces_delay_ms=EXPORT_DELAY_MS if settings.receives_spans else None,
        read=served_repository,
    )
    embedded = EmbeddedTriton(options)
    try:
        await supervisor.unless_requested(embedded.start(lambda progress: say(f"Triton: {progress}")))
        async with (
            supervisor.running("watch of the embedded Triton", embedded.watch()),
            supervisor.running("watch of the models' files", embedded.reload_changed())
            if settings.is_development
            else nullcontext(),
        ):
            yield Triton(embedded.grpc_url, embedded.metrics_url, allows_fast_pings=True, restart=embedded.restart)
    finally:
        await embedded.stop()


@dataclass(slots=True)
class Declarations:
    """What the catalog's pipelines declare about models, and their samples as canaries."""

    catalog: Catalog | None = None
    """None until the models are known."""

    @property
    def _pipelines(self) -> Sequence[Pipeline]:
        """The compiled pipelines."""
        entries = self.catalog.entries.values() if self.catalog is not None else ()
        return [entry.pipeline for entry in entries if entry.pipeline is not None]

    def canaries(self) -> Mapping[str, Canary]:
        """Pipelines whose samples the gateway does not run, or that are not one model, have no canary."""
        single = (each for each in self._pipelines if each.spec.runs_sample and each.spec.steps is None)
        found = (self._canary_of(pipeline) for pipeline in single)
        return {canary.request.model: canary for canary in found if canary is not None}

    def _canary_of(self, pipeline: Pipeline) -> Canary | None:
        assert self.catalog is not None
        try:
            request = pipeline.probe_of(body_of(pipeline, pipeline.spec.sample or {}, self.catalog.folder))
        except (GatewayError, OSError, TypeError, ValueError):
            return None  # the catalog reports a sample that cannot be used
        models = pipeline.graph.models
        timeouts_s = [each.longest_timeout_s for each in self._pipelines if not models.isdisjoint(each.graph.models)]
        deadline_s = max(self.catalog.context.timeout_s, *timeouts_s)
        return Canary(replace(request, is_probe=True), pipeline.config.decoupled, deadline_s)

    def of(self, model: str) -> ModelDeclaration:
        streams = [each.spec.stream for each in self._pipelines if model in each.graph.models]
        first_output_s = max((stream.first_output_s or 0.0 for stream in streams if stream is not None), default=0.0)
        calling = [each.spec for each in self._pipelines if model in dict(each.spec.called.keys())]
        return ModelDeclaration(first_output_s, [pattern for spec in calling for pattern in spec.engine_errors])


UP = {"up", "slow"}
"""States of a Triton that answers."""


@dataclass(slots=True)
class Servers:
    settings: Settings
    triton: Triton
    metrics: Metrics
    tracer: Tracer
    supervisor: Supervisor
    declarations: Declarations = field(default_factory=Declarations)
    health: dict[str, TritonHealth] = field(default_factory=dict)
    shared_memory: SharedMemory | None = None
    """Only with a single Triton: Tritons on other machines cannot map it."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[InferenceServer]:
        """For the duration of the block the gateway calls its Tritons, and cares for them."""
        if self.triton.is_single:
            async with self._server(self.triton.addresses[0]) as server:
                yield server.engine
            return
        balancer = Balancer(self._count_states, self.metrics.triton_repeats.inc)
        self._count_states({})
        pool = ServerPool(self.triton.addresses, balancer, self._server, self.declarations.canaries)
        try:
            await pool.open()
            async with self.supervisor.running("watch of the Tritons", pool.run()):
                yield balancer
        finally:
            await pool.close()

    @asynccontextmanager
    async def _server(self, address: str) -> AsyncIterator[TritonServer]:
        """One Triton and its watch."""
        settings, triton, metrics = self.settings, self.triton, self.metrics
        is_single = triton.is_single
        health = TritonHealth(self.declarations.of, self._count_fault, may_reload=settings.triton_repair)
        observers: list[CallObserver] = [partial(CountedCall, metrics=metrics, address="" if is_single else address)]
        if self.tracer is not None:
            observers.append(partial(traced_call, self.tracer))
        if settings.log_tensors == "shapes":
            observers.append(LoggedCall)
        transport_of = open_transport(
            address,
            fast_pings=triton.allows_fast_pings,
            kind=settings.grpc,
            authority=address if address in triton.addresses else triton.addresses[0],
            credentials=credentials_of(settings),
        )
        async with AsyncExitStack() as stack:
            transport = await stack.enter_async_context(transport_of)
            if is_single and (limit := settings.shared_memory_bytes):
                shared_memory = SharedMemory(
                    registry_of(transport),
                    limit,
                    MAX_MESSAGE_BYTES,
                    lambda way: metrics.large_calls.labels(way).inc(),
                    metrics.show_shared_memory,
                )
                self.shared_memory = shared_memory
                stack.push_async_callback(shared_memory.close)
                await stack.enter_async_context(self.supervisor.running("shared memory", shared_memory.run()))
            engine = TritonEngine(transport, observers, health, PacedCancels(triton.share.of), self.shared_memory)
            engine.on_repeat = metrics.triton_repeats.inc if is_single else None
            stack.push_async_callback(engine.close)
            watch = HealthWatch(engine, health, self.declarations.canaries, triton.restart, triton.turn)
            self.health[address] = health
            stack.callback(self.health.pop, address)
            await stack.enter_async_context(self.supervisor.running(f"watch of Triton at {address}", watch.run()))
            yield TritonServer(address, engine, health)

    def _count_fault(self, fault: ModelFault, model: str, change: int) -> None:
        if fault is ModelFault.OPEN:
            self.metrics.open_breakers.labels(model).inc(change)
        elif fault in DEAD and change > 0:
            is_engine = fault is ModelFault.ENGINE
            (self.metrics.engine_deaths if is_engine else self.metrics.stub_deaths).labels(model).inc()

    def _count_states(self, states: Mapping[str, str], ejected: str = "") -> None:
        """Without a known address, `triton_up` has the DNS name."""
        self.metrics.triton_up.clear()
        for address, state in (states or {self.triton.grpc_url: "down"}).items():
            self.metrics.triton_up.labels(address).set(state in UP)
        if ejected:
            self.metrics.triton_ejections.labels(ejected, states[ejected]).inc()


PORTS = Ports(grpc=8001, http=8000, metrics=8002)
"""Triton's usual ports, on the loopback address."""


async def run_triton(settings: Settings, ports: Ports = PORTS) -> None:
    """Runs only the wheel's Triton, for gateways and clients on this machine, until SIGTERM, SIGINT or SIGHUP.

    Raises EmbeddedTritonError.
    """
    supervisor = Supervisor()
    supervisor.listen_to_signals()
    options = EmbeddedOptions(settings.embedded_repository, settings.models_venv, ports, read=served_repository)
    triton = EmbeddedTriton(options)
    try:
        with suppress(ShutdownRequested):
            await supervisor.unless_requested(triton.start(lambda progress: say(f"Triton: {progress}")))
            say(f"Triton is ready: gRPC {triton.grpc_url}, HTTP {triton.http_url}, {triton.metrics_url}")
            watching = asyncio.create_task(triton.watch())
            await supervisor.requested.wait()
            watching.cancel()
    finally:
        await triton.stop()
