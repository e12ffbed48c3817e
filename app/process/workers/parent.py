"""The processes of ``triton-gateway serve`` with several workers: their shares, their start, their replacement.

The parent reserves the ports and owns the embedded Triton. docs/decisions/0013-processes.md has the reasons.
"""

import asyncio
import logging
import os
import pickle
import signal
import sys
from asyncio.subprocess import Process
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import Counter

from app.core.aio import Backoff
from app.core.share import Share
from app.process.listening import GRACE_S, LAST_BYTES_S, reserved
from app.process.supervision import Supervisor, first_of
from app.process.tritons import Triton, running_triton
from app.process.workers.worker import BEAT_S, STATES, Board, Worker, restart_by_parent
from app.settings import PREFIX, Settings, SettingsError

COMMAND = (sys.executable, "-m", "app.process.workers.worker")
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STABLE_S = 60.0
"""A worker that ran at least this long is replaced after the first delay again."""
SILENCE_S = 30.0
"""A worker whose event loop does not run for this time is killed."""
START_S = 120.0
"""Time limit for its first heartbeat."""
END_S = LAST_BYTES_S + GRACE_S + 5.0
"""Time limit for a worker to end after its drain."""
SHARED_OUT = ("max_connections", "max_bytes_in_flight", "max_kept_bytes", "max_kept_streams")
"""Settings that are totals for all workers."""

_log = logging.getLogger(__name__)


async def run_workers(settings: Settings, supervisor: Supervisor, stack: AsyncExitStack) -> None:
    """Serves with several processes until a signal arrives, then drains them. Names what needs one process.

    Raises SettingsError, ListeningPortTaken or EmbeddedTritonError, and SystemExit with the status of a worker that
    cannot start.
    """
    check_shares(settings)
    if settings.redis_url is None:
        _log.warning("/v1/streams answers 501 resumable_streams_off: several workers need GATEWAY_REDIS_URL")
    if settings.without_effect:
        _log.warning(settings.without_effect)
    folder = stack.enter_context(TemporaryDirectory(prefix="triton-gateway-"))
    port = stack.enter_context(reserved(settings.host, settings.port, f"{PREFIX}PORT"))
    admin_port = stack.enter_context(reserved(settings.host, settings.admin_port, f"{PREFIX}ADMIN_PORT"))
    triton = await stack.enter_async_context(running_triton(settings, supervisor, admin_port))
    if (restart := triton.restart) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(restart()))
    own = settings.model_copy(update={"port": port, "admin_port": admin_port})
    pool = WorkerPool(own, triton, supervisor, Board(Path(folder), settings.workers))
    await stack.enter_async_context(supervisor.running("workers", pool.run()))
    await supervisor.requested.wait()
    await pool.drain()
    if pool.failed_status:
        raise SystemExit(pool.failed_status)


class WorkerPool:
    """``settings``: of the gateway, with its real ports. Requests the shutdown if no worker can start."""

    def __init__(self, settings: Settings, triton: Triton, supervisor: Supervisor, board: Board) -> None:
        self._settings = settings
        self._triton = triton
        self._supervisor = supervisor
        self._board = board
        board.keep_metrics(0)
        self._deaths = Counter("triton_gateway_worker_deaths", "", registry=None)
        self._running: dict[int, Process] = {}
        self._has_served = False
        self.failed_status = 0
        """That of a worker that ended before any worker served: the gateway cannot be started like this."""

    async def run(self) -> None:
        """Keeps each worker running until it is cancelled. Then kills those that still run.

        The own state is 1 as soon as all workers have been ready.
        """
        own, *statuses = self._board.statuses
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(1, len(statuses) + 1):
                    group.create_task(self._keep(number))
                while True:
                    self._board.beat()
                    if {STATES[status.state] for status in statuses} == {"ready"}:
                        own.state = 1
                    await asyncio.sleep(BEAT_S)
        finally:
            self._signal(signal.SIGKILL)

    async def drain(self) -> None:
        """Drains every worker, and returns when all have ended, or should have ended. A second signal hurries them."""
        drain_s = self._settings.shutdown_delay_s + self._settings.drain_s
        self._signal(signal.SIGTERM)
        await first_of(self._ended(), self._supervisor.hurried.wait(), timeout_s=drain_s + END_S)
        if self._supervisor.hurried.is_set():
            self._signal(signal.SIGTERM)
            await first_of(self._ended(), timeout_s=END_S)
        if self._running:
            _log.error("workers did not end in time and are killed")

    async def _ended(self) -> None:
        while self._running:
            await asyncio.sleep(0.02)

    async def _keep(self, number: int) -> None:
        """Starts a worker, and again when it ends, with a delay that grows unless it ran for long."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, forgiven_s=STABLE_S)
        while not self._supervisor.requested.is_set():
            try:
                status = await self._run_worker(number)
            except OSError as exc:
                status = 1
                _log.error("worker %d cannot be started: %s", number, exc.strerror)
            if not (self._has_served or self._supervisor.requested.is_set()):
                self.failed_status = max(status, 1)
                self._supervisor.request()
            await asyncio.sleep(backoff.fail())

    async def _run_worker(self, number: int) -> int:
        """Starts a worker, which Ctrl-C does not reach, and kills it if it hangs.

        Returns the exit status of its process. Raises OSError if it cannot be started.
        """
        share, restart = Share(number, self._settings.workers), self._triton.restart and restart_by_parent
        worker = Worker(
            settings_of_worker(self._settings, share),
            replace(self._triton, restart=restart, share=share, turn=self._board.turn),
            self._board,
            parent=os.getpid(),
        )
        with os.fdopen(os.memfd_create("worker"), "w+b") as file:
            pickle.dump(worker, file)
            file.seek(0)
            process = await asyncio.create_subprocess_exec(*COMMAND, stdin=file, start_new_session=True)
        self._running[number] = process
        if self._supervisor.requested.is_set():
            process.terminate()
        statuses, beats, silence_s = self._board.statuses, 0, 0.0
        ended = asyncio.create_task(process.wait())
        while not (await asyncio.wait({ended}, timeout=BEAT_S))[0]:
            beats, before = statuses[number].beats, beats
            # without times in which this process itself did not run
            silence_s = silence_s + BEAT_S if beats == before else 0.0
            if silence_s > (SILENCE_S if beats else START_S):
                _log.error("worker %d does not respond and is killed", number, extra={"pid": process.pid})
                process.kill()
        del self._running[number]
        self._has_served |= any(status.state for status in statuses)
        self._board.clear(number)
        if not self._supervisor.requested.is_set():
            self._deaths.inc()
            text = "worker %d ended with status %d and is replaced"
            _log.error(text, number, ended.result(), extra={"pid": process.pid})
        return ended.result()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
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
    body = settings.max_body_bytes if settings.max_body_bytes <= settings.max_bytes_in_flight else 0
    least = {"max_connections": 1, "max_kept_streams": 1, "max_bytes_in_flight": body}
    for name, needed in least.items():
        if (total := getattr(settings, name)) < settings.workers * needed:
            of_body = ", GATEWAY_MAX_BODY_BYTES" if needed > 1 else ""
            needs = f"each of the {settings.workers} workers needs at least {needed}{of_body}"
            raise SettingsError(f"{PREFIX}{name.upper()} is {total}: {needs}")
