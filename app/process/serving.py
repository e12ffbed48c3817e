"""The process: the embedded Triton, the gateway over it, the catalog's refresh, and the drain."""

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from app import __version__
from app.api.samples import samples_of
from app.api.state import Gateway, Limits
from app.domain.calls import CallObserver, CallObservers
from app.main import create_admin_app, create_app
from app.observability.exporter import open_tracer
from app.observability.metrics import CallMetrics, Metrics
from app.observability.tensors import TensorLog
from app.observability.tracing import CallTracing, Tracer
from app.pipelines.cancellation import Canceller
from app.pipelines.catalog import Catalog
from app.pipelines.compile import Surroundings
from app.pipelines.file import ConfigError, read_gateway_file
from app.process.listening import bound, running
from app.process.refreshing import keep_fresh
from app.process.stores import running_store
from app.process.tasks import Stopped, background, stop_on_signals, unless_stopped
from app.settings import PREFIX, Settings
from app.streams.store import StreamStore
from app.triton.channel import open_channel
from app.triton.embedded.options import EmbeddedOptions
from app.triton.embedded.progress import shown_on
from app.triton.embedded.server import EmbeddedTriton
from app.triton.engine import TritonEngine

WAITING_S = 2.0
"""Ready later than that, the gateway says once what it waits for."""
_log = logging.getLogger(__name__)
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class _Triton:
    grpc_url: str
    metrics_url: str | None
    allows_tight_pings: bool


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises PortTaken, StoreUnusable, ConfigError or EmbeddedTritonError before anything is served.
    """
    stop = stop_on_signals()
    config = settings.config_path
    if config is not None:
        read_gateway_file(config)
    with contextlib.suppress(Stopped):
        async with AsyncExitStack() as stack:
            main = stack.enter_context(bound(settings.host, settings.port, f"{PREFIX}PORT"))
            admin = stack.enter_context(bound(settings.host, settings.admin_port, f"{PREFIX}ADMIN_PORT"))
            tracer = await stack.enter_async_context(open_tracer(settings.traces_url, __version__))
            store = await stack.enter_async_context(running_store(settings.redis_url))
            triton = await stack.enter_async_context(_triton(settings, stop))
            gateway = await stack.enter_async_context(_gateway(settings, config, triton, store, tracer))
            port, admin_port = main.getsockname()[1], admin.getsockname()[1]
            app = create_app(
                gateway,
                admin_port=admin_port,
                cors_origins=settings.cors_origins,
                with_docs=settings.docs,
                with_console=settings.console,
            )
            async with running(app, main), running(create_admin_app(gateway, api_port=port), admin):
                url = f"http://{settings.host}:{port}"
                async with background(_announce(gateway, url, triton.grpc_url)):
                    await stop.wait()
                await _drain(gateway, settings.drain_s)


@asynccontextmanager
async def _triton(settings: Settings, stop: asyncio.Event) -> AsyncIterator[_Triton]:
    """The Triton to talk to; the embedded one lives as long as this context."""
    if not settings.embedded:
        yield _Triton(settings.triton_url, settings.triton_metrics_url, allows_tight_pings=False)
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
            await unless_stopped(embedded.start(on_progress), stop)
        async with background(embedded.watch()):
            yield _Triton(embedded.grpc_url, embedded.metrics_url, allows_tight_pings=True)
    finally:
        await embedded.stop()


def _environment(settings: Settings) -> dict[str, str]:
    """What the models of the embedded Triton are to know of the settings: names as in model_kit."""
    key = {"EARLY_EXIT_KEY": settings.early_exit_key} if settings.early_exit_key else {}
    return os.environ | {f"{PREFIX}LOG_TENSORS": settings.log_tensors} | key


@asynccontextmanager
async def _gateway(
    settings: Settings, config: Path | None, triton: _Triton, store: StreamStore, tracer: Tracer
) -> AsyncIterator[Gateway]:
    """Raises ConfigError where gateway.yaml does not fit the models of a Triton that is already there."""
    metrics = Metrics(__version__)
    async with open_channel(triton.grpc_url, tight_pings=triton.allows_tight_pings) as channel:
        engine = TritonEngine(channel, _observer(settings, metrics, tracer))
        catalog = Catalog(engine, config, Surroundings(settings.timeout_s, _key_of(settings)))
        catalog.load_file()
        await catalog.refresh()
        if catalog.complaints:
            raise ConfigError("\n".join(catalog.complaints))
        gateway = Gateway(
            engine=engine,
            catalog=catalog,
            metrics=metrics,
            canceller=Canceller(engine),
            limits=Limits(settings.max_body_bytes, ping_s=settings.ping_s, send_s=settings.send_timeout_s),
            store=store,
            triton_metrics_url=triton.metrics_url,
            tracer=tracer,
        )
        async with background(keep_fresh(catalog, engine, metrics)):
            yield gateway
        await gateway.canceller.close()
        await engine.close()


def _observer(settings: Settings, metrics: Metrics, tracer: Tracer) -> CallObserver:
    observers: list[CallObserver] = [CallMetrics(metrics)]
    if settings.traces_url is not None:
        observers.append(CallTracing(tracer))
    if settings.log_tensors == "shapes":
        observers.append(TensorLog())
    return CallObservers(*observers)


def _key_of(settings: Settings) -> bytes | None:
    return settings.early_exit_key.encode() if settings.early_exit_key else None


async def _announce(gateway: Gateway, url: str, triton_url: str) -> None:
    says_why_at = time.monotonic() + WAITING_S
    while not gateway.is_ready:
        await asyncio.sleep(0.05)
        if time.monotonic() > says_why_at:
            _say(_missing(gateway.catalog, triton_url))
            says_why_at = math.inf
    _say(f"triton-gateway is ready: {url}/")
    pipelines = [entry.pipeline for entry in gateway.catalog.entries.values() if entry.pipeline]
    sample = next((samples["curl"] for pipeline in pipelines if (samples := samples_of(pipeline, url))), None)
    if sample is not None:
        _say(f"Try: {sample}")


def _missing(catalog: Catalog, triton_url: str) -> str:
    if not catalog.triton_is_up:
        return f"Waiting for Triton at {triton_url}."
    waited_for = (f"{name} ({entry.state.words})" for name, entry in catalog.unready.items())
    return f"Waiting for {', '.join(waited_for)}."


def _say(line: str) -> None:
    # Not by rich, whose first line takes 30 ms of the event loop: of the first request's time.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


async def _drain(gateway: Gateway, drain_s: float) -> None:
    """Readiness fails and new work is refused at once; what runs may go on for a while, then is told why it ends."""
    _log.info("draining", extra={"streams": len(gateway.streams), "drain_s": drain_s})
    gateway.is_draining = True
    ends = time.monotonic() + drain_s
    await gateway.end_streams(drain_s)
    while gateway.in_flight and time.monotonic() < ends:
        await asyncio.sleep(0.02)
