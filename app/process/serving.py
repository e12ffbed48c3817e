"""Runs ``triton-gateway serve``: opens everything that the gateway needs, waits for a signal, and drains the gateway.

``announce`` writes the messages for the user at the terminal.
"""

import asyncio
import gc
import logging
import math
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from app import __version__
from app.admission.keys import read_keys
from app.api.error_table import problem_of, problem_response
from app.api.exchange import FreedMemory, keep_freed_memory, release_freed_memory
from app.api.pipelines.catalog_endpoints import samples_of
from app.api.probes import Processes
from app.core.errors import Draining, TooManyRequests
from app.http1.protocol import ConnectionLimit, HttpConnection
from app.observability.log import say
from app.observability.tracing import tracer_of
from app.pipelines.catalog import Catalog
from app.pipelines.examples import Filled, example_of, file_names_of
from app.pipelines.file import read_gateway_file, warn_without_counter
from app.pipelines.pipeline import Pipeline
from app.process.gateway import open_gateway
from app.process.supervision import LAST_BYTES_S, ShutdownRequested, Supervisor, first_of, listening, serving, url_of
from app.process.tritons import running_triton
from app.process.workers import PageOfAll, Worker, run_workers
from app.routes import DIALECTS, create_admin_app, create_app
from app.settings import PREFIX, Settings, SettingsError, check_credentials
from app.streams.store import KeepLimits, MemoryStore, StreamStore
from app.triton.connect import wrong_address

_log = logging.getLogger(__name__)

WAITING_S = 2.0
"""If the start takes longer than this, report once what is missing."""


async def announce(
    catalog: Catalog, url: str, triton_url: str, processes: Processes | None = None, *, with_key: bool = False
) -> None:
    """Reports when the gateway is ready and how to try it, then waits until cancelled.

    ``with_key``: whether the gateway requires API keys.
    """
    says_why_at = time.monotonic() + WAITING_S
    for address in map(str.strip, () if catalog.triton_is_up else triton_url.split(",")):
        if problem := await wrong_address(address):
            say(f"Triton at {address}: {problem}.")
    while not (catalog.is_ready and (processes is None or processes.is_ready)):
        await asyncio.sleep(0.05)
        if time.monotonic() > says_why_at:
            unready = [f"{name} ({entry.state.words})" for name, entry in catalog.unready.items()]
            waited_for = ", ".join(unready or ["the other processes"])
            say(f"Waiting for {waited_for if catalog.triton_is_up else f'Triton at {triton_url}'}.")
            says_why_at = math.inf
    say(f"triton-gateway is ready: {url}/")
    pipelines = [entry.pipeline for entry in catalog.entries.values() if entry.pipeline]
    if pipelines:
        say(f"Try: {_call_of(min(pipelines, key=hard_to_try), url, with_key=with_key)}")
    await asyncio.Event().wait()


def hard_to_try(pipeline: Pipeline) -> tuple[bool, bool, bool, bool]:
    """Is smallest for a declared sample, then small values, an ensemble, and a text or a file as input."""
    is_large = any(isinstance(value, Filled) for value in example_of(pipeline).values())
    has_text = any(field.spec.kind != "number" for field in pipeline.inputs)
    return pipeline.spec.sample is None, is_large, not pipeline.config.is_ensemble, not has_text


def _call_of(pipeline: Pipeline, url: str, *, with_key: bool) -> str:
    """A call that works where it is pasted: without values of a large tensor, and without files that are elsewhere."""
    is_large = any(isinstance(value, Filled) for value in example_of(pipeline).values())
    has_files = all(Path(path).is_file() for paths in file_names_of(pipeline).values() for path in paths)
    if has_files and not is_large:
        return samples_of(pipeline, url, with_key=with_key)["curl"]
    address = f"{url}/v1/pipelines/{pipeline.name}"
    key = ' -H "Authorization: Bearer $API_KEY"' if with_key else ""
    if pipeline.spec.sample is None:
        return f"curl {address}{key}"
    return f"curl {address}/examples/sample{key} | curl {address}{key} -H 'Content-Type: application/json' -d @-"


ADMIN_CONNECTIONS = 256
YOUNG_OBJECTS = 10_000
"""New objects after which the garbage collector looks for cycles."""


async def serve(settings: Settings, worker: Worker | None = None) -> int:
    """Runs until SIGTERM, SIGINT or SIGHUP. ``worker``: if this process is one of several on the same ports.

    Returns the exit status: 1 if a background task ended unexpectedly. Raises Unusable or EmbeddedTritonError before
    anything is served.
    """
    supervisor = Supervisor()
    supervisor.listen_to_signals()
    check_files(settings)
    with suppress(ShutdownRequested):
        async with AsyncExitStack() as stack:
            if settings.workers > 1 and worker is None:
                await run_workers(settings, supervisor, stack)
            else:
                await _run_gateway(settings, worker, supervisor, stack)
    return int(supervisor.has_failed)


async def _run_gateway(
    settings: Settings, worker: Worker | None, supervisor: Supervisor, stack: AsyncExitStack
) -> None:
    """Serves until the first signal, still serves for ``shutdown_delay_s``, then rejects new work and drains.

    Running work may take ``drain_s`` seconds, and then ends with ``draining``. The second signal ends both phases.
    """

    async def running(name: str, work: Coroutine[Any, Any, None]) -> None:
        await stack.enter_async_context(supervisor.running(name, work))

    main, admin = (
        stack.enter_context(listening(settings.host, port, f"{PREFIX}{name}", shares_port=worker is not None))
        for port, name in ((settings.port, "PORT"), (settings.admin_port, "ADMIN_PORT"))
    )
    port, admin_port = main.getsockname()[1], admin.getsockname()[1]
    if (tracer := tracer_of(settings.traces_url, __version__)) is not None:
        stack.push_async_callback(tracer.close)
    store = None
    if worker is None or settings.redis_url is not None:
        store = await stack.enter_async_context(open_store(settings))
        await running("store of streams", store.run())
    if worker is None:
        triton = await stack.enter_async_context(running_triton(settings, supervisor, admin_port))
    else:
        triton = worker.triton
    gateway = await stack.enter_async_context(open_gateway(settings, triton, store, tracer, supervisor))
    if worker is not None:
        gateway.page = PageOfAll(gateway.inference.metrics.registry, worker.board.folder)
        await running("state of this worker", worker.run(gateway))
    app = create_app(gateway, admin_port=admin_port)
    admin_app = create_admin_app(gateway, api_port=port, processes=worker)
    keep_freed_memory()
    # The garbage collector would otherwise look at everything made so far, which lives as long as the process: a full
    # collection stops every request for 26 ms, and collections take 5 % of the time under load.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    refused = lambda: gateway.inference.metrics.rejected.labels(TooManyRequests.code).inc()  # noqa: E731
    limit = ConnectionLimit(gateway.limits.max_connections, refused, problem_response)
    server = await stack.enter_async_context(serving(app, main, supervisor, limit))
    admin_limit = ConnectionLimit(ADMIN_CONNECTIONS, refused, problem_response)
    await stack.enter_async_context(serving(admin_app, admin, supervisor, admin_limit))
    catalog, workload, url = gateway.inference.catalog, gateway.inference.workload, url_of(settings.host, port)
    async with AsyncExitStack() as announcing:
        if worker is None or (triton.share.number == 1 and not worker.board.statuses[0].state):
            announcement = announce(catalog, url, triton.grpc_url, worker, with_key=gateway.keys is not None)
            await announcing.enter_async_context(supervisor.running("announcement", announcement))
        await supervisor.requested.wait()
    # Readiness fails at once, so load balancers send new connections elsewhere. Each answer has `Connection: close`, so
    # clients with open connections follow, without a request that fails.
    workload.is_shutting_down = True
    limit.is_closing = True
    for connection in server.server_state.connections:
        cast("HttpConnection", connection).close_after_answer()
    if delay_s := settings.shutdown_delay_s:
        _log.info("shutting down", extra={"in_flight": len(workload.running), "delay_s": delay_s})
        await first_of(supervisor.hurried.wait(), timeout_s=delay_s)
    _log.info("draining", extra={"in_flight": len(workload.running), "drain_s": settings.drain_s})
    workload.start_draining()
    await first_of(workload.idle(), supervisor.hurried.wait(), timeout_s=settings.drain_s)
    for work in list(workload.running):
        work.end(Draining("The gateway is shutting down."))
    await first_of(workload.idle(), timeout_s=LAST_BYTES_S)


EXTRAS = {"redis_url": ("redis", "redis"), "otlp_endpoint": ("otel", "opentelemetry")}
"""By setting that needs an extra: its name, and a package that it installs."""


def check_files(settings: Settings) -> None:
    """Raises ConfigError or SettingsError for a setting or a file that cannot be used."""
    for name, (extra, package) in EXTRAS.items():
        if getattr(settings, name) is not None and find_spec(package) is None:
            raise SettingsError(f"{PREFIX}{name.upper()} needs the extra `{extra}`: pip install '.[{extra}]'")
    check_credentials(settings)
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file, DIALECTS)
    if settings.config_path is not None:
        warn_without_counter(read_gateway_file(settings.config_path))


def open_store(settings: Settings) -> StreamStore:
    limits = KeepLimits(settings.max_kept_bytes, settings.max_kept_streams)
    if settings.redis_url is None:
        return MemoryStore(limits, FreedMemory(release_freed_memory).add)
    from app.streams.redis_store import RedisStore  # noqa: PLC0415 - needs an extra that may not be installed

    return RedisStore(settings.redis_url, problem_of, limits)
