"""Runs ``triton-gateway serve`` with several workers: starts their processes, replaces and drains them.

``supervise`` reserves the ports and owns the embedded Triton, ``WorkerPool`` keeps a worker process for each number,
and ``settings_of_worker`` divides the limits. docs/decisions/0013-processes.md has the reasons.
"""

import asyncio
import logging
import os
import pickle
import select
import signal
import sys
import time
from asyncio.subprocess import Process
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace

from app import __version__
from app.core.aio import Backoff
from app.core.share import Share
from app.observability.log import configure_logging
from app.observability.tracing import open_tracer
from app.pipelines.file import GatewayFile
from app.process.listening import GRACE_S, reserved
from app.process.serving import check_files, open_store
from app.process.shutdown import LAST_BYTES_S, Shutdown, ShutdownRequested
from app.process.supervision import Supervisor
from app.process.tritons import Triton, running_triton
from app.process.workers.board import Board, Series
from app.process.workers.worker import BEAT_S, STATES, Worker
from app.settings import PREFIX, Settings, SettingsError

COMMAND = (sys.executable, "-m", "app.process.workers")
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STABLE_S = 60.0
"""A worker that ran at least this long is replaced without a delay."""
SILENCE_S = 30.0
"""A worker whose event loop does not run for this time is killed."""
START_S = 120.0
"""Time limit for its first heartbeat."""
END_S = LAST_BYTES_S + GRACE_S + 5.0
"""Time limit for a worker to end after its drain."""
DEATHS = Series("counter", "triton_gateway_worker_deaths", "triton_gateway_worker_deaths_total")
SHARED_OUT = ("max_connections", "max_bytes_in_flight", "max_kept_bytes", "max_kept_streams")
"""Settings that are totals for all workers."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """One worker, and the processes that take its place one after the other."""

    number: int
    board: Board = field(default_factory=Board.create)
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_DELAY_S, LONGEST_DELAY_S))
    process: Process | None = None
    started_at: float = 0.0
    beats: float = 0.0
    silence_s: float = 0.0
    """How long there was no heartbeat, without times in which the parent itself did not run."""


class WorkerPool:
    """``settings``: of the gateway, with its real ports. ``shutdown``: is requested if no worker can start."""

    def __init__(self, settings: Settings, triton: Triton, shutdown: Shutdown) -> None:
        self._settings = settings
        self._triton = triton
        self._shutdown = shutdown
        self._board = Board.create()
        """Of this process. Its state is 1 as soon as all workers have been ready."""
        self._deaths = self._board.value(DEATHS)
        self._places = [_Place(number) for number in range(1, settings.workers + 1)]
        self._has_served = False
        self.failed_status = 0
        """That of a worker that ended before any worker served: the gateway cannot be started like this."""

    async def run(self) -> None:
        """Starts the workers, and each again when it ends, until it is cancelled. Then kills those that still run."""
        try:
            while True:
                for place in self._places:
                    if place.process is None:
                        if place.backoff.is_due and not self._shutdown.requested.is_set():
                            await self._start(place)
                    elif place.process.returncode is not None:
                        self._replace(place, place.process, place.process.returncode)
                    else:
                        self._check(place, place.process)
                self._board.beat()
                states = {STATES[int(place.board.state.get())] for place in self._places}
                self._has_served |= states != {"starting"}
                if states == {"ready"}:
                    self._board.state.set(1)
                await asyncio.sleep(BEAT_S)
        finally:
            self._signal(signal.SIGKILL)

    async def drain(self, drain_s: float) -> None:
        """Drains every worker, and returns when all have ended, or should have ended."""
        self._signal(signal.SIGTERM)
        ends, is_hurried = time.monotonic() + drain_s + END_S, False
        while self._running and time.monotonic() < ends:
            if self._shutdown.hurried.is_set() and not is_hurried:
                is_hurried, ends = True, time.monotonic() + END_S
                self._signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
        if self._running:
            _log.error("workers did not end in time and are killed")

    async def _start(self, place: _Place) -> None:
        """Starts a worker in a session of its own, so that Ctrl-C reaches only this process."""
        share = Share(place.number, self._settings.workers)
        boards = [self._board, *[each.board for each in self._places]]
        worker = Worker(
            share,
            settings_of_worker(self._settings, share),
            replace(self._triton, restart=None),
            restarts_triton=self._triton.restart is not None,
            boards=boards,
            parent=os.getpid(),
            announces=place.number == 1 and not self._deaths.get(),
        )
        place.started_at, place.silence_s = time.monotonic(), 0.0
        try:
            with os.fdopen(os.memfd_create("worker"), "w+b") as file:
                file.write(pickle.dumps(worker))
                file.seek(0)
                inherited = [board.descriptor for board in boards]
                place.process = await asyncio.create_subprocess_exec(
                    *COMMAND, stdin=file, pass_fds=inherited, start_new_session=True
                )
            if self._shutdown.requested.is_set():
                place.process.terminate()
        except OSError as exc:
            _log.error("worker %d cannot be started: %s", place.number, exc.strerror)
            self._fail(place, 1)

    def _replace(self, place: _Place, ended: Process, status: int) -> None:
        place.process = None
        place.board.clear()
        if not self._shutdown.requested.is_set():
            self._deaths.inc(1)
            text = "worker %d ended with status %d and is replaced"
            _log.error(text, place.number, status, extra={"pid": ended.pid})
            self._fail(place, status)

    def _fail(self, place: _Place, status: int) -> None:
        if time.monotonic() - place.started_at > STABLE_S:
            place.backoff.reset()
        else:
            place.backoff.fail()
        if not self._has_served:
            self.failed_status = max(status, 1)
            self._shutdown.request()

    def _check(self, place: _Place, process: Process) -> None:
        """Kills a worker that hangs."""
        beats = place.board.beats.get()
        place.silence_s = place.silence_s + BEAT_S if beats == place.beats else 0.0
        place.beats = beats
        if place.silence_s > (SILENCE_S if beats else START_S):
            _log.error("worker %d does not respond and is killed", place.number, extra={"pid": process.pid})
            process.kill()

    @property
    def _running(self) -> list[Process]:
        processes = [place.process for place in self._places if place.process is not None]
        return [process for process in processes if process.returncode is None]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                process.send_signal(number)


def settings_of_worker(settings: Settings, share: Share) -> Settings:
    """Returns the settings with a worker's part of the limits of the gateway."""
    shares = {name: share.part(getattr(settings, name)) for name in SHARED_OUT}
    if settings.shared_memory_limit:
        shares["shared_memory_bytes"] = share.part(settings.shared_memory_limit)
    return settings.model_copy(update=shares)


def check_shares(settings: Settings) -> None:
    """Raises SettingsError if a worker's share of a limit is too small."""
    workers = settings.workers
    for name in ("max_connections", "max_kept_streams"):
        if (total := getattr(settings, name)) < workers:
            raise SettingsError(f"{PREFIX}{name.upper()} is {total}: each of the {workers} workers needs one")
    share = settings.max_bytes_in_flight // workers
    if share < settings.max_body_bytes <= settings.max_bytes_in_flight:
        raise SettingsError(
            f"GATEWAY_MAX_BYTES_IN_FLIGHT gives each of the {workers} workers {share} bytes, less than "
            f"GATEWAY_MAX_BODY_BYTES, {settings.max_body_bytes}: no worker could accept the largest body"
        )


def _warn_of_what_is_off(settings: Settings, file: GatewayFile | None) -> None:
    """Names what needs one process, because the processes share nothing."""
    if settings.redis_url is None:
        _log.warning("/v1/streams answers 501 resumable_streams_off: several workers need GATEWAY_REDIS_URL")
    if file is not None and any(pipeline.session is not None for pipeline in file.spec.pipelines.values()):
        path = "POST /v1/pipelines/{pipeline}/sessions"
        _log.warning("%s answers 501 http_sessions_off: use a WebSocket, or set GATEWAY_WORKERS=1", path)
    for each in settings.without_effect:
        _log.warning(each)


async def supervise(settings: Settings) -> None:
    """Raises what ``app.process.serving.serve`` raises, and SystemExit with the status of a worker that cannot start.

    Checks once what otherwise every worker would report.
    """
    check_shares(settings)
    configure_logging(settings.log_level, settings.log_format, write_bytes=select.PIPE_BUF)
    shutdown = Shutdown()
    shutdown.listen_to_signals()
    supervisor = Supervisor(on_failure=shutdown.request)
    _warn_of_what_is_off(settings, check_files(settings))
    with suppress(ShutdownRequested):
        async with AsyncExitStack() as stack:
            port = stack.enter_context(reserved(settings.host, settings.port, f"{PREFIX}PORT"))
            admin_port = stack.enter_context(reserved(settings.host, settings.admin_port, f"{PREFIX}ADMIN_PORT"))
            async with open_tracer(settings.traces_url, __version__):
                pass
            if settings.redis_url is not None:
                async with open_store(settings):
                    pass
            triton = await stack.enter_async_context(running_triton(settings, shutdown, supervisor, admin_port))
            if (restart := triton.restart) is not None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(restart()))
            own = settings.model_copy(update={"port": port, "admin_port": admin_port})
            pool = WorkerPool(own, triton, shutdown)
            await stack.enter_async_context(supervisor.running("workers", pool.run()))
            await shutdown.requested.wait()
            await pool.drain(settings.shutdown_delay_s + settings.drain_s)
            if pool.failed_status:
                raise SystemExit(pool.failed_status)
    supervisor.raise_if_failed()
