"""``triton-gateway serve``: opens everything that the gateway needs, runs it until a signal comes, and drains it."""

import gc
from contextlib import AsyncExitStack, suppress

from starlette.types import ASGIApp

from app import __version__
from app.admission.keys_file import read_keys
from app.api import freed_memory
from app.api.connection.protocol import ConnectionLimit
from app.api.problems import problem_of
from app.main import Gateway, Pages, create_admin_app, create_app
from app.observability.explain.store import ExplainStore
from app.observability.exporter import open_tracer
from app.pipelines.file import read_gateway_file
from app.process.announcing import announce
from app.process.credentials import check_credentials
from app.process.gateway import Stores, open_gateway
from app.process.listening import listening, serving, url_of
from app.process.open_files import connections_within
from app.process.shutdown import Shutdown, ShutdownRequested, delay, drain
from app.process.supervision import Supervisor
from app.process.triton import running_triton
from app.settings import PREFIX, Settings
from app.streams.memory_store import MemoryStore
from app.streams.quota import KeepLimits
from app.streams.store import StoreUnusable, StreamStore

ADMIN_CONNECTIONS = 256
YOUNG_OBJECTS = 10_000
"""New objects after which the garbage collector looks for cycles."""


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM, SIGINT or SIGHUP.

    Raises PortTaken, StoreUnusable, ConfigError, TracingUnavailable or EmbeddedTritonError before anything is served,
    and BackgroundTaskFailed at the end if a background task ended unexpectedly.
    """
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    supervisor = Supervisor(on_failure=shutdown.request)
    check_files(settings)
    with suppress(ShutdownRequested):
        async with AsyncExitStack() as stack:
            main = stack.enter_context(listening(settings.host, settings.port, f"{PREFIX}PORT"))
            admin = stack.enter_context(listening(settings.host, settings.admin_port, f"{PREFIX}ADMIN_PORT"))
            tracer = await stack.enter_async_context(open_tracer(settings.traces_url, __version__))
            store = await stack.enter_async_context(open_store(settings))
            await stack.enter_async_context(supervisor.running("store of streams", store.run()))
            port, admin_port = main.getsockname()[1], admin.getsockname()[1]
            triton = await stack.enter_async_context(running_triton(settings, shutdown, supervisor, admin_port))
            stores = Stores(store, ExplainStore() if settings.may_explain else None)
            gateway = await stack.enter_async_context(open_gateway(settings, triton, stores, tracer, supervisor))
            app = api_of(gateway, settings, admin_port)
            refused = gateway.inference.metrics.count_refused_connection
            limit = ConnectionLimit(connections_within(settings.max_connections), refused)
            admin_limit = ConnectionLimit(ADMIN_CONNECTIONS, refused)
            admin_app = create_admin_app(gateway, api_port=port)
            freed_memory.keep()
            freeze_heap()
            server = await stack.enter_async_context(serving(app, main, supervisor, limit))
            await stack.enter_async_context(serving(admin_app, admin, supervisor, admin_limit))
            catalog, with_key = gateway.inference.catalog, gateway.keys is not None
            announcement = announce(catalog, url_of(settings.host, port), triton.grpc_url, with_key=with_key)
            async with supervisor.running("announcement", announcement):
                await shutdown.requested.wait()
            await delay(gateway.inference.workload, server, shutdown, settings.shutdown_delay_s)
            await drain(gateway.inference.workload, shutdown, settings.drain_s)
    supervisor.raise_if_failed()


def check_files(settings: Settings) -> None:
    """Raises ConfigError or SettingsError for a file that cannot be used, before anything is started."""
    check_credentials(settings)
    if settings.config_path is not None:
        read_gateway_file(settings.config_path)
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file)


def api_of(gateway: Gateway, settings: Settings, admin_port: int) -> ASGIApp:
    return create_app(
        gateway,
        admin_port=admin_port,
        cors_origins=settings.cors_origins,
        cors_headers=settings.cors_headers,
        pages=Pages(settings.docs, settings.console, settings.offers_load),
    )


def freeze_heap() -> None:
    """Keeps the garbage collector away from everything made so far, which lives as long as the process.

    A full collection would otherwise stop every request for 26 ms, and collections take 5 % of the time under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def open_store(settings: Settings, *, must_answer: bool = True) -> StreamStore:
    """Raises StoreUnusable. ``must_answer``: whether it is an error if Redis does not answer now."""
    limits = KeepLimits(settings.max_kept_bytes, settings.max_kept_streams)
    if settings.redis_url is None:
        return MemoryStore(limits, freed_memory.FreedMemory(freed_memory.release).add)
    try:
        from app.streams.redis_store import RedisStore  # noqa: PLC0415 - needs an extra that may not be installed
    except ModuleNotFoundError as exc:
        raise StoreUnusable("GATEWAY_REDIS_URL needs the extra `redis`: pip install '.[redis]'") from exc
    return RedisStore(settings.redis_url, problem_of, limits, must_answer=must_answer)
