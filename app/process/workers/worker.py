"""``python -m app.process.workers.worker``: a gateway with its share of the limits and its parent's Triton.

The numbers of each worker are in files that the workers and their parent share. The metrics are in the form of
prometheus_client for several processes. A worker that replaces another one goes on counting in the same files. So
counters never decrease, and every worker can make the page of all.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, values
from prometheus_client.core import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from app.config.document import ConfigError
from app.main import Gateway
from app.observability.log import configure_logging
from app.process.listening import ListeningPortTaken
from app.process.supervision import BackgroundTaskFailed
from app.process.tritons import Triton
from app.settings import Settings

FIRST_BYTES = 64 * 1024
"""A file of metrics grows to twice its size when it is full."""
_GAUGES = ("gauge_livesum", "gauge_livemax")
_UNSHARED = ("process_start_time_seconds", "process_max_fds")


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
        self._cpu_s = 0.0

    def __reduce__(self) -> tuple[type[Self], tuple[Path, int]]:
        """Another process opens the same files."""
        return type(self), (self.folder, self._workers)

    def keep_metrics(self, number: int) -> None:
        """Shares all metrics that this process, the worker ``number``, creates from now on.

        But not gauges without a mode: these describe Triton, and are the same in every process.
        """
        unshared: Any = values.MutexValue
        creating = Lock()

        def value_of(kind: str, *series: Any, multiprocess_mode: str = "", **_: object) -> Any:
            if kind == "gauge" and multiprocess_mode not in {"livesum", "livemax"}:
                return unshared(kind, *series)
            name = f"{kind}_{multiprocess_mode}" if kind == "gauge" else kind
            with creating:
                if name not in self.files:
                    path = str(self.folder / f"{name}_{number}.db")
                    self.files[name] = MmapedDict(path)  # type: ignore[no-untyped-call]
                return SharedValue(self.files[name], mmap_key(*series))

        values.ValueClass = value_of
        self._number = number
        self._cpu = Counter("process_cpu_seconds", "Total user and system CPU time spent in seconds.", registry=None)
        self._process = {
            family.name: Gauge(family.name, family.documentation, registry=None, multiprocess_mode="livesum")
            for family in ProcessCollector(registry=None).collect()
            if family.type == "gauge" and family.name not in _UNSHARED
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
        """Yields whether no other worker repairs Triton now. The kernel ends the turn of a process that dies."""
        with self.path.open("rb") as file:  # the lock is that of this opening
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except OSError:
                is_ours = False
            yield is_ours

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


STATES = ("starting", "not_ready", "ready")
BEAT_S = 0.25
_PR_SET_PDEATHSIG = 1


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
    def announces(self) -> bool:
        """Whether this one says when the gateway is ready for the first time."""
        return self.triton.share.number == 1 and not self.board.statuses[0].state

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
            status.needs_restart = gateway.health.needs_restart
            gateway.show_load()
            await asyncio.sleep(BEAT_S)


def main() -> int:
    """Serves until SIGTERM. Standard input has the pickled Worker. Returns the exit status."""
    from app.process.serving import serve  # noqa: PLC0415 - it imports this module

    worker: Worker = pickle.load(sys.stdin.buffer)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing else would stop the worker without its parent
    if os.getppid() != worker.parent:
        return 0
    settings, number = worker.settings, worker.triton.share.number
    worker.board.keep_metrics(number)
    configure_logging(settings.log_level, settings.log_format, {"worker": number})
    try:
        uvloop.run(serve(settings, worker))
    except (ConfigError, ListeningPortTaken) as exc:
        logging.getLogger(__name__).error("%s", exc)
        return 2
    except BackgroundTaskFailed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
