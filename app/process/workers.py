"""Several workers: gateways on the same ports, each with its share of the limits, and the parent that starts them.

The parent reserves the ports and owns the embedded Triton. ``python -m app.process.workers`` is a worker: a gateway
that calls its parent's Triton. docs/decisions/0013-processes.md has the reasons.

The numbers of each process are in files that all share. The metrics are in the form of prometheus_client for several
processes. A worker that replaces another one goes on counting in the same files. So counters never decrease, and every
worker can make the page of all.
"""

import asyncio
import ctypes
import fcntl
import logging
import mmap
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Self

import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, values
from prometheus_client.core import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from app.admission.admission import Share
from app.core.aio import Backoff
from app.core.errors import Unusable
from app.observability.log import configure_logging
from app.process.supervision import GRACE_S, LAST_BYTES_S, Supervisor, reserved
from app.process.tritons import Triton, running_triton
from app.routes import Gateway
from app.settings import PREFIX, Settings, SettingsError
from app.triton.health.health import needs_restart

COMMAND = (sys.executable, "-m", "app.process.workers")
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
SHARED_OUT = ("max_connections", "max_bytes_in_flight", "max_kept_bytes", "max_kept_streams", "shared_memory_bytes")
"""Settings that are totals for all workers."""
STATES = ("starting", "not_ready", "ready")
BEAT_S = 0.25
FIRST_BYTES = 64 * 1024
"""A file of metrics grows to twice its size when it is full."""
_GAUGES = ("gauge_livesum", "gauge_livemax")

_log = logging.getLogger(__name__)


class Status(ctypes.Structure):
    """What the other processes must know of one process."""

    _fields_ = (("state", ctypes.c_int), ("beats", ctypes.c_int), ("needs_restart", ctypes.c_bool))


class SharedValue:
    """A value in a file of prometheus_client, whose own class takes twice the time for each change."""

    __slots__ = ("_index", "_lock", "_slots")

    def __init__(self, file: Any, key: str) -> None:
        file.read_value(key)  # creates it
        self._slots: Any = memoryview(file._m).cast("d")
        self._index = file._positions[key] // 8
        self._lock = Lock()

    def inc(self, amount: float) -> None:
        with self._lock:
            self._slots[self._index] += amount

    def set(self, value: float, timestamp: float | None = None) -> None:
        self._slots[self._index] = value

    def get(self) -> float:
        return float(self._slots[self._index])

    def get_exemplar(self) -> None:
        return None


class Board:
    """``statuses``: of the parent, then of each worker.

    The process that makes the board has its files in memory. The folder has only links to them, so that a full folder
    cannot end a process that writes.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self._workers = folder, workers
        self.path = folder / "statuses"
        kind = Status * (workers + 1)
        if not self.path.exists():
            kinds, numbers = ("counter", "histogram", *_GAUGES), range(workers + 1)
            sizes = {f"{each}_{number}.db": FIRST_BYTES for each in kinds for number in numbers}
            for name, size in {**sizes, self.path.name: ctypes.sizeof(kind)}.items():
                descriptor = os.memfd_create(name)
                os.ftruncate(descriptor, size)
                (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        with self.path.open("r+b") as file:
            self.statuses: Any = kind.from_buffer(mmap.mmap(file.fileno(), 0))
        self.files: dict[str, Any] = {}
        """Those in which this process has its metrics."""

    def __reduce__(self) -> tuple[type[Self], tuple[Path, int]]:
        """Another process opens the same files."""
        return type(self), (self.folder, self._workers)

    def keep_metrics(self, number: int) -> None:
        """Shares all metrics that this process, the worker ``number``, creates from now on.

        But not gauges without a mode: these describe Triton, and are the same in every process.
        """
        creating = Lock()

        def value_of(kind: str, *series: Any, multiprocess_mode: str = "", **_: object) -> Any:
            if kind == "gauge" and multiprocess_mode not in {"livesum", "livemax"}:
                return values.MutexValue(kind, *series)  # type: ignore[no-untyped-call]
            name = f"{kind}_{multiprocess_mode}" if kind == "gauge" else kind
            with creating:
                if name not in self.files:
                    path = str(self.folder / f"{name}_{number}.db")
                    self.files[name] = MmapedDict(path)  # type: ignore[no-untyped-call]
                return SharedValue(self.files[name], mmap_key(*series))

        values.ValueClass = value_of
        self._number, self._cpu_s = number, 0.0
        self._cpu = Counter("process_cpu_seconds", "Total user and system CPU time spent in seconds.", registry=None)
        self._process = {
            family.name: Gauge(family.name, family.documentation, registry=None, multiprocess_mode="livesum")
            for family in ProcessCollector(registry=None).collect()
            if family.type == "gauge" and family.name not in ("process_start_time_seconds", "process_max_fds")
        }

    def beat(self) -> None:
        """Call it often: shows that the event loop runs, and what the operating system knows of this process."""
        self.statuses[self._number].beats += 1
        before, self._cpu_s = self._cpu_s, time.process_time()
        self._cpu.inc(self._cpu_s - before)
        for family in ProcessCollector(registry=None).collect():
            if family.name in self._process:
                self._process[family.name].set(family.samples[0].value)

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Yields whether another worker repairs Triton now. The kernel ends the turn of a process that dies."""
        with self.path.open("rb") as file:  # the lock is that of this opening
            is_other = True
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_other = False
            yield is_other

    def clear(self, number: int) -> None:
        """Call it when the worker has ended: its gauges end with it."""
        self.statuses[number] = Status()
        for kind in _GAUGES:
            gauges: Any = MmapedDict(str(self.folder / f"{kind}_{number}.db"))  # type: ignore[no-untyped-call]
            for name, *_ in list(gauges.read_all_values()):
                gauges.write_value(name, 0.0, 0.0)
            gauges.close()


@dataclass(frozen=True, slots=True)
class PageOfAll(Collector):
    """``own``: the metrics of this process. The numbers of the others are as old as their last write."""

    own: CollectorRegistry
    folder: Path

    def collect(self) -> Iterator[Metric]:
        of_all: Any = MultiProcessCollector
        shared = {family.name: family for family in of_all(None, str(self.folder)).collect()}
        return (shared.get(family.name, family) for family in self.own.collect())


async def restart_by_parent() -> None:
    """The parent started the embedded Triton. It ignores the signal while Triton starts."""
    os.kill(os.getppid(), signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Worker:
    """Created by the parent. Implements :class:`app.api.probes.Processes`.

    ``settings``: with the worker's part of each limit.
    """

    settings: Settings
    triton: Triton
    board: Board
    parent: int

    @property
    def states(self) -> Mapping[str, str]:
        return {str(n): STATES[status.state] for n, status in enumerate(self.board.statuses) if n}

    @property
    def is_ready(self) -> bool:
        """At start, requires every worker to be ready. Later, workers that are being replaced do not count."""
        states = set(self.states.values())
        return bool(self.board.statuses[0].state) and "ready" in states and "not_ready" not in states

    @property
    def needs_restart(self) -> bool:
        return any(status.needs_restart for status in self.board.statuses)

    async def run(self, gateway: Gateway) -> None:
        """Shows the state of this process until it is cancelled."""
        status = self.board.statuses[self.triton.share.number]
        while True:
            self.board.beat()
            status.state = 2 if gateway.inference.catalog.is_ready else 1
            status.needs_restart = needs_restart(gateway.health)
            gateway.show_load()
            await asyncio.sleep(BEAT_S)


async def run_workers(settings: Settings, supervisor: Supervisor, stack: AsyncExitStack) -> None:
    """Serves with several processes until a signal arrives, then drains them. Names what needs one process.

    Raises Unusable or EmbeddedTritonError, and SystemExit with the status of a worker that
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
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._has_served = False
        self.failed_status = 0
        """The exit status of a worker that ended before any worker served: the gateway cannot start like this."""

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
        ends_at = time.monotonic() + self._settings.shutdown_delay_s + self._settings.drain_s + END_S
        is_hurried = False
        self._signal(signal.SIGTERM)
        while self._running and time.monotonic() < ends_at:
            if self._supervisor.hurried.is_set() and not is_hurried:
                is_hurried, ends_at = True, time.monotonic() + END_S
                self._signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
        if self._running:
            _log.error("workers did not end in time and are killed")

    async def _keep(self, number: int) -> None:
        """Starts a worker, and again when it ends, with a delay that grows unless it ran for long."""
        share, restart = Share(number, self._settings.workers), self._triton.restart and restart_by_parent
        triton = replace(self._triton, restart=restart, share=share, turn=self._board.turn)
        worker = Worker(settings_of_worker(self._settings, share), triton, self._board, parent=os.getpid())
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, forgiven_s=STABLE_S)
        while not self._supervisor.requested.is_set():
            try:
                with os.fdopen(os.memfd_create("worker"), "w+b") as file:
                    pickle.dump(worker, file)
                    file.seek(0)
                    process = await asyncio.create_subprocess_exec(*COMMAND, stdin=file, start_new_session=True)
            except OSError as exc:
                status = 1
                _log.error("worker %d cannot be started: %s", number, exc.strerror)
            else:
                status = await self._ended(number, process)
            if not (self._has_served or self._supervisor.requested.is_set()):
                self.failed_status = max(status, 1)
                self._supervisor.request()
            await asyncio.sleep(backoff.fail())

    async def _ended(self, number: int, process: asyncio.subprocess.Process) -> int:
        """Waits until a worker ends, which Ctrl-C does not reach, and kills it if it hangs. Returns its exit status."""
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
    shares = {name: share.part(getattr(settings, name)) for name in SHARED_OUT if getattr(settings, name)}
    return settings.model_copy(update=shares)


def check_shares(settings: Settings) -> None:
    """Raises SettingsError if a worker's share of a limit is too small."""
    body = settings.max_body_bytes if settings.max_body_bytes <= settings.max_bytes_in_flight else 0
    least = {"max_connections": 1, "max_kept_streams": 1, "max_bytes_in_flight": body}
    for name, needed in least.items():
        if (total := getattr(settings, name)) < settings.workers * needed:
            text = f"{PREFIX}{name.upper()} is {total}: each of the {settings.workers} workers needs at least {needed}"
            raise SettingsError(text + (", GATEWAY_MAX_BODY_BYTES" if needed > 1 else ""))


def main() -> int:
    """Serves until SIGTERM. Standard input has the pickled Worker. Returns the exit status."""
    from app.process.serving import serve  # noqa: PLC0415 - it imports this module

    worker: Worker = pickle.load(sys.stdin.buffer)
    # PR_SET_PDEATHSIG: nothing else would stop the worker without its parent
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != worker.parent:
        return 0
    settings, number = worker.settings, worker.triton.share.number
    worker.board.keep_metrics(number)
    configure_logging(settings.log_level, settings.log_format, {"worker": number})
    try:
        return uvloop.run(serve(settings, worker))
    except Unusable as exc:
        logging.getLogger(__name__).error("%s", exc)
        return 2


if __name__ == "__main__":
    sys.exit(main())
