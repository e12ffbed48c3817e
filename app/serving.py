"""The process: sockets, the embedded Triton, two servers, the catalog's refresh, signals and the drain."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from app import __version__
from app.api.protocol import BoundedProtocol
from app.api.samples import samples_of
from app.api.state import Gateway, Limits
from app.checking import log_findings
from app.domain.engine import Engine
from app.main import create_admin_app, create_app
from app.observability.metrics import Metrics
from app.observability.tensors import TensorLog
from app.observability.tracing import TracedEngine, Tracer, open_tracer
from app.pipelines.cancellation import Canceller
from app.pipelines.catalog import Catalog, State
from app.pipelines.compile import Surroundings
from app.pipelines.file import ConfigError, read_gateway_file
from app.settings import PREFIX, Settings
from app.stores import running_store
from app.streams.store import StreamStore
from app.triton.channel import open_channel
from app.triton.embedded.options import EmbeddedOptions
from app.triton.embedded.progress import shown_on
from app.triton.embedded.server import EmbeddedTriton
from app.triton.engine import TritonEngine

KEEP_ALIVE_S = 75
REFRESH_S = 2.0
REFRESH_UNREADY_S = 0.25
FAREWELL_S = 5.0
"""For the last bytes of ended streams and requests to leave."""

_log = logging.getLogger(__name__)
_console = Console(stderr=True)
_T = TypeVar("_T")


class PortTaken(Exception):
    """A port of the gateway's own cannot be had; the message names its setting."""


class _Stopped(Exception):
    """A signal came before anything was served."""


@dataclass(frozen=True, slots=True)
class _Triton:
    grpc_url: str
    metrics_url: str | None
    allows_tight_pings: bool


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises PortTaken, StoreUnusable, ConfigError or EmbeddedTritonError before anything is served.
    """
    stop = _stop_on_signals()
    config = settings.config_path
    if config is not None:
        read_gateway_file(config)
    with contextlib.suppress(_Stopped):
        async with AsyncExitStack() as stack:
            main, admin = (stack.enter_context(_bound(settings, name)) for name in ("port", "admin_port"))
            tracer = await stack.enter_async_context(open_tracer(settings.traces_url, __version__))
            store = await stack.enter_async_context(running_store(settings.redis_url))
            triton = await stack.enter_async_context(_triton(settings, stop))
            gateway = await stack.enter_async_context(_gateway(settings, config, triton, store, tracer))
            app = create_app(
                gateway,
                cors_origins=settings.cors_origins,
                with_docs=settings.docs,
                with_console=settings.console,
            )
            async with _running(app, main), _running(create_admin_app(gateway), admin):
                await _until_stopped(gateway, f"http://{settings.host}:{main.getsockname()[1]}", stop)
                await _drain(gateway, settings.drain_s)


@contextmanager
def _bound(settings: Settings, name: str) -> Iterator[socket.socket]:
    port = getattr(settings, name)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((settings.host, port))
        except OSError as exc:
            raise PortTaken(f"{PREFIX}{name.upper()}: cannot listen on {settings.host}:{port}: {exc.strerror}") from exc
        yield bound


@asynccontextmanager
async def _triton(settings: Settings, stop: asyncio.Event) -> AsyncIterator[_Triton]:
    """The Triton to talk to; the embedded one lives as long as this context."""
    if not settings.embedded:
        yield _Triton(settings.triton_url, settings.triton_metrics_url, allows_tight_pings=False)
        return
    options = EmbeddedOptions(
        settings.embedded_repository,
        settings.embedded_venv,
        environment=_environment(settings),
        traces_url=settings.traces_url,
    )
    embedded = EmbeddedTriton(options)
    try:
        with shown_on(_console) as on_progress:
            await _unless_stopped(embedded.start(on_progress), stop)
        async with _background(embedded.watch()):
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
        engine: Engine = TritonEngine(channel, metrics.count_triton_call)
        if settings.log_tensors == "shapes":
            engine = TensorLog(engine)
        if settings.traces_url is not None:
            engine = TracedEngine(engine, tracer)
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
        async with _background(_keep_fresh(gateway)):
            yield gateway
        await gateway.canceller.close()


def _key_of(settings: Settings) -> bytes | None:
    return settings.early_exit_key.encode() if settings.early_exit_key else None


async def _keep_fresh(gateway: Gateway) -> None:
    """Follows the models and the file for as long as the gateway runs; checks them once, when all are ready."""
    is_checked = False
    while True:
        await gateway.catalog.refresh()
        await gateway.catalog.warm_up()
        _measure(gateway)
        if gateway.catalog.is_ready and not is_checked:
            await log_findings(gateway.engine, gateway.catalog.file)
            is_checked = True
        await asyncio.sleep(REFRESH_S if gateway.catalog.is_ready else REFRESH_UNREADY_S)


def _measure(gateway: Gateway) -> None:
    gateway.metrics.triton_up.set(gateway.catalog.triton_is_up)
    gateway.metrics.config_reload_failed.set(gateway.catalog.reload_failed)
    for entry in gateway.catalog.entries.values():
        gateway.metrics.model_ready.labels(entry.spec.model).set(entry.state in {State.READY, State.WARMING})


class _Server(uvicorn.Server):
    """Leaves the signals to :func:`serve`, which drains first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _running(app: FastAPI, bound: socket.socket) -> AsyncIterator[None]:
    server = _Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(FAREWELL_S),
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def _until_stopped(gateway: Gateway, url: str, stop: asyncio.Event) -> None:
    async with _background(_announce(gateway, url)):
        await stop.wait()


async def _announce(gateway: Gateway, url: str) -> None:
    while not gateway.is_ready:
        await asyncio.sleep(0.05)
    _console.print(f"triton-gateway is ready: {url}/", highlight=False, soft_wrap=True)
    pipelines = [entry.pipeline for entry in gateway.catalog.entries.values() if entry.pipeline]
    sample = next((samples["curl"] for pipeline in pipelines if (samples := samples_of(pipeline, url))), None)
    if sample is not None:
        _console.print(f"Try: {sample}", highlight=False, markup=False, soft_wrap=True)


async def _drain(gateway: Gateway, drain_s: float) -> None:
    """Readiness fails and new work is refused at once; what runs may go on for a while, then is told why it ends."""
    _log.info("draining", extra={"streams": len(gateway.streams), "drain_s": drain_s})
    gateway.is_draining = True
    ends = time.monotonic() + drain_s
    await gateway.end_streams(drain_s)
    while gateway.in_flight and time.monotonic() < ends:
        await asyncio.sleep(0.02)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _unless_stopped(work: Coroutine[Any, Any, _T], stop: asyncio.Event) -> _T:
    """Raises _Stopped, with the work cancelled, where a signal comes first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.wait({working})
    raise _Stopped


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
