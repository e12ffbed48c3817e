"""The numbers of each worker, in files that the workers and their parent share.

The metrics are in the form of prometheus_client for several processes. A worker that replaces another one goes on
counting in the same files. So counters never decrease, and every worker can make the page of all.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, values
from prometheus_client.core import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

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
