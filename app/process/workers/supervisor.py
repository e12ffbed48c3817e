"""Runs ``triton-gateway serve`` with several workers: starts, guides, replaces and drains their processes.

``supervise`` opens what the workers share, ``WorkerPool`` manages the ``WorkerProcess`` of each number, and
``settings_of_worker`` divides the limits of the gateway among the workers. docs/decisions/0028-workers.md has the
reasons.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from app import __version__
from app.core.aio import Backoff
from app.http1.protocol import ConnectionLimit
from app.main import Gateway, create_admin_app
from app.observability.explain.request import ExplainedRequest
from app.observability.explain.store import ExplainStore
from app.observability.log import configure_logging, turns_by
from app.observability.statistics import statistics_of
from app.observability.tracing import NoTracer, open_tracer
from app.observability.worker_metrics import Descriptors, MetricsReader, Series, SummedMetrics
from app.process.gateway import Stores, open_gateway
from app.process.listening import GRACE_S, listening, listening_together, serving, url_of
from app.process.open_files import connections_within
from app.process.serving import ADMIN_CONNECTIONS, announce, check_files, freeze_heap, open_store
from app.process.shutdown import LAST_BYTES_S, Shutdown, ShutdownRequested
from app.process.supervision import Supervisor
from app.process.tritons import Triton, WorkerPart, running_triton
from app.process.workers.channel import (
    Channel,
    ExplanationFound,
    ExplanationWanted,
    Report,
    StatisticsWanted,
    Totals,
    WorkerConfig,
    WorkerUpdate,
)
from app.settings import PREFIX, Settings, SettingsError

COMMAND = (sys.executable, "-m", "app.cli", "worker")


class WorkerProcess:
    """One worker process, as the supervisor sees it. Created by :meth:`start`."""

    def __init__(self, process: Process, channel: Channel, numbers: MetricsReader) -> None:
        self.state = "starting"
        """Changes to ``ready`` or ``not_ready`` when the worker accepts connections."""
        self.silence_s = 0.0
        """Seconds since the last report, without times in which the supervisor itself did not run."""
        self._process = process
        self._channel = channel
        self._numbers = numbers
        self._update: WorkerUpdate | None = None

    @classmethod
    async def start(cls, config: WorkerConfig) -> "WorkerProcess":
        """Starts a worker in a separate session, so that Ctrl-C reaches only the supervisor. Raises OSError."""
        numbers = MetricsReader(config.metrics)
        ours, theirs = socket.socketpair()
        try:
            inherited = (
                theirs.fileno(),
                config.metrics.values,
                config.metrics.names,
                config.log_lock,
                *config.listeners,
            )
            process = await asyncio.create_subprocess_exec(
                *COMMAND, str(theirs.fileno()), stdin=DEVNULL, pass_fds=inherited, start_new_session=True
            )
        except BaseException:
            ours.close()
            numbers.close()
            raise
        finally:
            theirs.close()
        channel = await Channel.open(ours)
        channel.send(config)
        return cls(process, channel, numbers)

    @property
    def serves(self) -> bool:
        """Whether it accepts connections."""
        return self.state != "starting"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, on_report: Callable[[Report], None], answer: Callable[[Any], Awaitable[object]]) -> int:
        """Handles the messages until the process ends. Returns its status, -n after signal n.

        ``answer``: takes every other message. The result is sent to the worker if it is not None.
        """
        with suppress(EOFError):
            while True:
                message = await self._channel.receive()
                if not isinstance(message, Report):
                    if (reply := await answer(message)) is not None:
                        self._channel.send(reply)
                    continue
                self.silence_s = 0.0
                self.state = "ready" if message.is_ready else "not_ready"
                on_report(message)
        return await self._process.wait()

    def update(self, update: WorkerUpdate) -> None:
        if update != self._update:
            self._update = update
            self._channel.send(update)

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def numbers(self) -> dict[Series, float]:
        """The values of its metrics."""
        return self._numbers.read()

    def close(self) -> None:
        """Frees the supervisor's resources for a process that has ended."""
        self._channel.close()
        self._numbers.close()


TICK_S = 0.25
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STABLE_S = 60.0
"""A worker that ran at least this long is replaced without a delay."""
MAX_STARTS = 5
"""If every worker ended this often before it served, the supervisor stops."""
SILENCE_S = 30.0
"""A worker without a report for this time counts as stuck and is killed."""
START_S = 120.0
"""Time limit for the first report."""
END_S = LAST_BYTES_S + GRACE_S + 5.0
"""Time limit for a worker to end after its drain."""

ConfigOf = Callable[[int, Descriptors], WorkerConfig]
"""Creates the configuration of the worker with this number."""

_log = logging.getLogger(__name__)


class WorkersCannotStart(Exception):
    """Every worker ended several times in a row before it served. The workers' log lines have the cause."""


class WorkerPool:
    """Manages all workers of a supervisor: starts, guides, replaces and drains them.

    Implements :class:`app.api.routes.health.Workers`. ``gateway``: the supervisor's, which monitors Triton.
    """

    def __init__(self, workers: int, config_of: ConfigOf, gateway: Gateway) -> None:
        self.registry = CollectorRegistry()
        self._config_of = config_of
        self._metrics = gateway.inference.metrics
        self._health = gateway.health
        self._explanations = gateway.explain_store
        self._running: dict[int, WorkerProcess] = {}
        self._failed_starts = dict.fromkeys(range(1, workers + 1), 0)
        """For each worker's number, how often in a row it ended before it served."""
        self._was_complete = False
        self._is_ending = False
        self._summed = SummedMetrics(self._metrics.registry, lambda: [each.numbers() for each in self._workers])
        self.registry.register(self._summed)
        self._metrics.processes.workers = lambda: [each.pid for each in self._workers]

    @property
    def states(self) -> Mapping[str, str]:
        running = self._running
        return {str(number): running[number].state if number in running else "starting" for number in self._numbers}

    @property
    def is_ready(self) -> bool:
        """At start, requires every worker to be ready. Later, workers that are being replaced do not count."""
        states = set(self.states.values())
        return self._was_complete and "ready" in states and "not_ready" not in states

    async def run(self) -> None:
        """Runs until it is cancelled. Raises WorkersCannotStart."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in self._numbers:
                    tasks.create_task(self._keep(number))
                tasks.create_task(self._watch())
        finally:
            self._signal(signal.SIGKILL)
            self._running.clear()

    async def drain(self, shutdown: Shutdown, drain_s: float) -> None:
        """Drains every worker, and kills workers that do not end in time."""
        self._is_ending = True
        self._signal(signal.SIGTERM)
        ends = time.monotonic() + drain_s + END_S
        is_hurried = False
        while self._running and time.monotonic() < ends:
            if shutdown.hurried.is_set() and not is_hurried:
                is_hurried, ends = True, time.monotonic() + END_S
                self._signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
        if self._running:
            _log.error("workers did not end in time and are killed")

    async def _keep(self, number: int) -> None:
        """Starts the worker again whenever it ends."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        while not self._is_ending:
            since = time.monotonic()
            await self._live(number)
            if time.monotonic() - since > STABLE_S:
                backoff.reset()
            elif not self._is_ending:
                await asyncio.sleep(backoff.fail())

    async def _live(self, number: int) -> None:
        """Runs one worker process until it ends. Raises WorkersCannotStart."""
        try:
            worker = await WorkerProcess.start(self._config_of(number, Descriptors.create()))
        except OSError as exc:
            _log.error("worker %d cannot be started: %s", number, exc.strerror)
            self._count_start(number, has_failed=True)
            return
        self._running[number] = worker
        if self._is_ending:
            worker.send_signal(signal.SIGTERM)
        status = await worker.run(self._heard, self._answer_to)
        del self._running[number]
        self._summed.keep(worker.numbers())
        worker.close()
        self._update_workers()
        if not self._is_ending:
            self._count_death(number, worker, status)

    def _count_death(self, number: int, worker: WorkerProcess, status: int) -> None:
        self._metrics.worker_deaths.inc()
        _log.error("worker %d ended with status %d and is replaced", number, status, extra={"pid": worker.pid})
        self._count_start(number, has_failed=not worker.serves)

    def _count_start(self, number: int, *, has_failed: bool) -> None:
        self._failed_starts[number] = self._failed_starts[number] + 1 if has_failed else 0
        if min(self._failed_starts.values()) >= MAX_STARTS:
            raise WorkersCannotStart

    def _heard(self, report: Report) -> None:
        self._health.add(report.observed)
        self._was_complete |= set(self.states.values()) == {"ready"}
        self._update_workers()

    async def _answer_to(self, message: StatisticsWanted | ExplainedRequest | ExplanationWanted) -> object:
        """Answers a worker's question; None if the message is no question."""
        if isinstance(message, StatisticsWanted):
            return Totals(statistics_of(self.registry))
        if self._explanations is None:
            return None
        if isinstance(message, ExplainedRequest):
            self._explanations.put(message)
            return None
        return ExplanationFound(message.number, await self._explanations.find(message.owner, message.request_id))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._update_workers()
            for number, worker in self._running.items():
                worker.silence_s += TICK_S
                if worker.silence_s > (SILENCE_S if worker.serves else START_S):
                    _log.error("worker %d does not respond and is killed", number, extra={"pid": worker.pid})
                    worker.send_signal(signal.SIGKILL)

    def _update_workers(self) -> None:
        """Sends the workers Triton's state, and assigns the connections of workers that do not serve."""
        serving = [number for number, worker in self._running.items() if worker.serves]
        orphans = [number for number in self._numbers if number not in serving]
        faults = self._health.faults
        for place, number in enumerate(serving):
            listens_on = frozenset([number, *orphans[place :: len(serving)]])
            self._running[number].update(WorkerUpdate(listens_on, faults))

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.send_signal(number)

    @property
    def _workers(self) -> list[WorkerProcess]:
        return list(self._running.values())

    @property
    def _numbers(self) -> range:
        return range(1, len(self._failed_starts) + 1)


SHARED_OUT = ("max_connections", "max_bytes_in_flight", "max_kept_bytes", "max_kept_streams")
"""Settings that are totals for all workers."""


def check_shares(settings: Settings) -> None:
    """Raises SettingsError if a worker's share of a limit is too small."""
    workers = settings.workers
    if settings.max_connections < workers:
        raise SettingsError(
            f"GATEWAY_MAX_CONNECTIONS is {settings.max_connections}: each of the {workers} workers needs one"
        )
    if settings.max_kept_streams < workers:
        raise SettingsError(
            f"GATEWAY_MAX_KEPT_STREAMS is {settings.max_kept_streams}: each of the {workers} workers needs one"
        )
    share = settings.max_bytes_in_flight // workers
    if share < settings.max_body_bytes <= settings.max_bytes_in_flight:
        raise SettingsError(
            f"GATEWAY_MAX_BYTES_IN_FLIGHT gives each of the {workers} workers {share} bytes, less than "
            f"GATEWAY_MAX_BODY_BYTES, {settings.max_body_bytes}: no worker could accept the largest body"
        )


def settings_of_worker(settings: Settings, number: int) -> Settings:
    """Returns the settings with a worker's part of the limits of the gateway.

    ``number``: from 1. The shares of all workers add up to the total.
    """
    shares = {name: _share(getattr(settings, name), number, settings.workers) for name in SHARED_OUT}
    if settings.shared_memory_limit:
        shares["shared_memory_bytes"] = _share(settings.shared_memory_limit, number, settings.workers)
    return settings.model_copy(update=shares)


def _share(total: int, number: int, workers: int) -> int:
    return total // workers + (number <= total % workers)


async def supervise(settings: Settings) -> None:
    """Owns the sockets, the embedded Triton and the admin port. Raises what ``app.process.serving.serve`` raises."""
    check_shares(settings)
    log_lock = os.memfd_create("turns of the log")
    configure_logging(settings.log_level, settings.log_format, turn=turns_by(log_lock))
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    supervisor = Supervisor(on_failure=shutdown.request)
    check_files(settings)
    connections_within(settings_of_worker(settings, 1).max_connections)
    with suppress(ShutdownRequested):
        async with AsyncExitStack() as stack:
            main = stack.enter_context(
                listening_together(settings.host, settings.port, f"{PREFIX}PORT", settings.workers)
            )
            admin = stack.enter_context(listening(settings.host, settings.admin_port, f"{PREFIX}ADMIN_PORT"))
            port, admin_port = main[0].getsockname()[1], admin.getsockname()[1]
            await _check_what_workers_need(settings)
            triton = await stack.enter_async_context(running_triton(settings, shutdown, supervisor, admin_port))
            stores = Stores(None, ExplainStore() if settings.may_explain else None)
            gateway = await stack.enter_async_context(open_gateway(settings, triton, stores, NoTracer(), supervisor))
            catalog = gateway.inference.catalog
            pool = WorkerPool(
                settings.workers, _WorkerConfigs(settings, triton, gateway, main, admin_port, log_lock), gateway
            )
            admin_app = create_admin_app(gateway, api_port=port, workers=pool)
            limit = ConnectionLimit(ADMIN_CONNECTIONS, gateway.inference.metrics.count_refused_connection)
            freeze_heap()
            await stack.enter_async_context(serving(admin_app, admin, supervisor, limit))
            await stack.enter_async_context(supervisor.running("workers", pool.run()))
            url = url_of(settings.host, port)
            announcement = announce(catalog, url, triton.grpc_url, pool, with_key=gateway.keys is not None)
            async with supervisor.running("announcement", announcement):
                await shutdown.requested.wait()
            gateway.inference.workload.is_delaying = True
            await pool.drain(shutdown, settings.shutdown_delay_s + settings.drain_s)
    supervisor.raise_if_failed()


@dataclass(frozen=True, slots=True)
class _WorkerConfigs:
    """Creates the configurations of new workers."""

    settings: Settings
    triton: Triton
    gateway: Gateway
    listeners: list[socket.socket]
    admin_port: int
    log_lock: int

    def __call__(self, number: int, metrics: Descriptors) -> WorkerConfig:
        keys, file = self.gateway.keys, self.gateway.inference.catalog.file
        part = WorkerPart(self.settings.workers, file, None if keys is None else keys.ring, number)
        return WorkerConfig(
            number=number,
            settings=settings_of_worker(self.settings, number),
            triton=replace(self.triton, restart=None, part=part),
            admin_port=self.admin_port,
            listeners=[listener.fileno() for listener in self.listeners],
            metrics=metrics,
            log_lock=self.log_lock,
            supervisor=os.getpid(),
        )


async def _check_what_workers_need(settings: Settings) -> None:
    """Raises StoreUnusable or TracingUnavailable once, here, instead of in every worker."""
    async with open_tracer(settings.traces_url, __version__):
        pass
    if settings.redis_url is None:
        _log.warning(
            "/v1/streams answers 501 resumable_streams_off: several workers need GATEWAY_REDIS_URL to share it"
        )
        return
    open_store(settings)
