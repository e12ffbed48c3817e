"""``triton-gateway serve``: opens everything that the gateway needs, runs it until a signal comes, and drains it."""

import gc
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from rich.console import Console
from starlette.types import ASGIApp

from app import __version__
from app.api.connection.protocol import ConnectionLimit
from app.api.inference import Inference
from app.api.limits import Limits
from app.api.problems import problem_of
from app.domain.calls import CallObserver, CallObservers
from app.files.complaints import ConfigError
from app.main import Gateway, create_admin_app, create_app
from app.observability.exporter import open_tracer
from app.observability.metrics import CallMetrics, LaneMetrics, Metrics
from app.observability.tensors import TensorLog
from app.observability.tracing import CallTracing, Tracer
from app.pipelines.cancellation import Canceller
from app.pipelines.catalog import Catalog
from app.pipelines.compile import Surroundings
from app.pipelines.file import GatewayFile, read_gateway_file
from app.process.announcing import announce
from app.process.canaries import SampleCanaries
from app.process.listening import listening, serving
from app.process.refreshing import ModelCheck, keep_fresh
from app.process.shutdown import Shutdown, ShutdownRequested, drain
from app.process.supervision import Supervisor
from app.settings import PREFIX, Settings
from app.streams.memory_store import MemoryStore
from app.streams.store import StoreUnusable, StreamStore
from app.triton.cancels import PacedCancels
from app.triton.embedded.options import EmbeddedOptions
from app.triton.embedded.progress import shown_on
from app.triton.embedded.server import EmbeddedTriton
from app.triton.engine import TritonEngine
from app.triton.health import TritonHealth
from app.triton.repair import StubRepair
from app.triton.shared_memory.lane import Lane
from app.triton.stubs import Stubs
from app.triton.stuck import Restart, StuckWatch
from app.triton.transport import Transport
from app.triton.transports import open_transport

ADMIN_CONNECTIONS = 256
YOUNG_OBJECTS = 10_000
"""New objects after which the garbage collector looks for cycles."""
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """What a worker is told of the whole. Its supervisor cares for Triton."""

    workers: int
    """How many there are."""
    file: GatewayFile | None
    """gateway.yaml as the supervisor last read it well."""


@dataclass(frozen=True, slots=True)
class Triton:
    """How the gateway reaches its Triton."""

    grpc_url: str
    metrics_url: str | None
    allows_tight_pings: bool
    restart: Restart | None = None
    """None for a Triton that the gateway did not start."""
    part: WorkerPart | None = None
    """None in a process that cares for this Triton: it repairs models, and notices that Triton is stuck."""


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM, SIGINT or SIGHUP.

    Raises PortTaken, StoreUnusable, ConfigError, TracingUnavailable or EmbeddedTritonError before anything is served,
    and BackgroundTaskFailed at the end if a background task ended unexpectedly.
    """
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    supervisor = Supervisor(on_failure=shutdown.request)
    if settings.config_path is not None:
        read_gateway_file(settings.config_path)
    with suppress(ShutdownRequested):
        async with AsyncExitStack() as stack:
            main = stack.enter_context(listening(settings.host, settings.port, f"{PREFIX}PORT"))
            admin = stack.enter_context(listening(settings.host, settings.admin_port, f"{PREFIX}ADMIN_PORT"))
            tracer = await stack.enter_async_context(open_tracer(settings.traces_url, __version__))
            store = await stack.enter_async_context(open_store(settings.redis_url))
            await stack.enter_async_context(supervisor.running("store of streams", store.run()))
            triton = await stack.enter_async_context(running_triton(settings, shutdown, supervisor))
            gateway = await stack.enter_async_context(open_gateway(settings, triton, store, tracer, supervisor))
            port, admin_port = main.getsockname()[1], admin.getsockname()[1]
            app = api_of(gateway, settings, admin_port)
            url = f"http://{settings.host}:{port}"
            refused = gateway.inference.metrics.count_refused_connection
            limit = ConnectionLimit(settings.max_connections, refused)
            admin_limit = ConnectionLimit(ADMIN_CONNECTIONS, refused)
            admin_app = create_admin_app(gateway, api_port=port)
            freeze_heap()
            await stack.enter_async_context(serving(app, main, supervisor, limit))
            await stack.enter_async_context(serving(admin_app, admin, supervisor, admin_limit))
            async with supervisor.running("announcement", announce(gateway.inference.catalog, url, triton.grpc_url)):
                await shutdown.requested.wait()
            await drain(gateway.inference.workload, shutdown, settings.drain_s)
    supervisor.raise_if_failed()


def api_of(gateway: Gateway, settings: Settings, admin_port: int) -> ASGIApp:
    return create_app(
        gateway,
        admin_port=admin_port,
        cors_origins=settings.cors_origins,
        with_docs=settings.docs,
        with_console=settings.console,
    )


def freeze_heap() -> None:
    """Keeps the garbage collector away from everything made so far, which lives as long as the process.

    A full collection would otherwise stop every request for 26 ms, and collections take 5 % of the time under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def open_store(redis_url: str | None) -> StreamStore:
    """Raises StoreUnusable."""
    if redis_url is None:
        return MemoryStore()
    try:
        from app.streams.redis_store import RedisStore  # noqa: PLC0415 - needs an extra that may not be installed
    except ModuleNotFoundError as exc:
        raise StoreUnusable("GATEWAY_REDIS_URL needs the extra `redis`: pip install '.[redis]'") from exc
    return RedisStore(redis_url, problem_of)


@asynccontextmanager
async def running_triton(settings: Settings, shutdown: Shutdown, supervisor: Supervisor) -> AsyncIterator[Triton]:
    """The Triton to call. An embedded one runs for the duration of the block."""
    if not settings.embedded:
        yield Triton(settings.triton_url, settings.triton_metrics_url, allows_tight_pings=False)
        return
    options = EmbeddedOptions(
        settings.embedded_repository,
        settings.models_venv,
        environment=_environment(settings),
        traces_url=settings.traces_url,
    )
    embedded = EmbeddedTriton(options)
    try:
        with shown_on(_console) as on_progress:
            await shutdown.unless_requested(embedded.start(on_progress))
        async with supervisor.running("watch of the embedded Triton", embedded.watch()):
            yield Triton(embedded.grpc_url, embedded.metrics_url, allows_tight_pings=True, restart=embedded.restart)
    finally:
        await embedded.stop()


def _environment(settings: Settings) -> dict[str, str]:
    """The environment of the embedded Triton, with the settings that its models read (names as in model_kit)."""
    key = {"EARLY_EXIT_KEY": settings.early_exit_key} if settings.early_exit_key else {}
    return os.environ | {f"{PREFIX}LOG_TENSORS": settings.log_tensors} | key


@asynccontextmanager
async def open_gateway(
    settings: Settings,
    triton: Triton,
    store: StreamStore | None,
    tracer: Tracer,
    supervisor: Supervisor,
) -> AsyncIterator[Gateway]:
    """Raises ConfigError if gateway.yaml does not fit the models of a Triton that already answers.

    A worker starts all the same: the other workers may still serve what the file said before.
    """
    part = triton.part
    metrics = Metrics(__version__)
    async with (
        open_transport(triton.grpc_url, tight_pings=triton.allows_tight_pings, kind=settings.grpc) as transport,
        _open_lane(settings, triton, transport, metrics, supervisor) as lane,
    ):
        health = TritonHealth(Stubs(metrics.count_stub_death))
        cancels = PacedCancels.shared_by(part.workers if part else 1)
        engine = TritonEngine(transport, _observer(settings, metrics, tracer), health, cancels, lane)
        catalog = Catalog(
            engine, settings.config_path, Surroundings(settings.timeout_s, _key_of(settings)), triton.grpc_url
        )
        catalog.load_file(part.file if part else None)
        await catalog.refresh()
        if catalog.complaints and part is None:
            raise ConfigError("\n".join(catalog.complaints))
        check = ModelCheck(catalog, engine, is_done=part is not None)
        await check.run_once()
        canceller = Canceller(engine)
        gateway = Gateway(
            Inference(engine, catalog, metrics, canceller, tracer),
            store,
            Limits(
                settings.max_body_bytes,
                settings.max_bytes_in_flight,
                ping_s=settings.ping_s,
                send_s=settings.send_timeout_s,
            ),
            None if lane is None else lane.bodies,
            triton.metrics_url,
            health,
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(supervisor.running("catalog refresh", keep_fresh(catalog, check, metrics)))
            if part is None:
                await stack.enter_async_context(_caring_for(triton, gateway, engine, settings, supervisor))
            yield gateway
        await canceller.close()
        await engine.close()


@asynccontextmanager
async def _open_lane(
    settings: Settings, triton: Triton, transport: Transport, metrics: Metrics, supervisor: Supervisor
) -> AsyncIterator[Lane | None]:
    """None without shared memory. A supervisor of workers has none: its workers call the models."""
    limit = settings.shared_memory_limit if triton.part or settings.workers == 1 else 0
    if not limit:
        yield None
        return
    lane = Lane(transport, limit, LaneMetrics(metrics))
    async with supervisor.running("shared memory", lane.run()):
        yield lane
    await lane.close()


@asynccontextmanager
async def _caring_for(
    triton: Triton, gateway: Gateway, engine: TritonEngine, settings: Settings, supervisor: Supervisor
) -> AsyncIterator[None]:
    """Repairs models, and notices that Triton is stuck, for the duration of the block."""
    canaries = SampleCanaries(gateway.inference.catalog)
    repair = StubRepair(engine, gateway.health.stubs, canaries, may_reload=settings.repairs_triton)
    watch = StuckWatch(engine, gateway.health.progress, canaries, restart=triton.restart)
    async with (
        supervisor.running("repair of models", repair.run()),
        supervisor.running("watch of inference calls", watch.run()),
    ):
        yield


def _observer(settings: Settings, metrics: Metrics, tracer: Tracer) -> CallObserver:
    observers: list[CallObserver] = [CallMetrics(metrics)]
    if settings.traces_url is not None:
        observers.append(CallTracing(tracer))
    if settings.log_tensors == "shapes":
        observers.append(TensorLog())
    return CallObservers(*observers)


def _key_of(settings: Settings) -> bytes | None:
    return settings.early_exit_key.encode() if settings.early_exit_key else None
