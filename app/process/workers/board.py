"""The numbers of each worker, in memory that the workers and their parent share.

The memory survives a killed worker, and the worker that replaces it goes on counting there. So counters never decrease,
and every worker can make the page of all without asking another process.
"""

import mmap
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple, Self

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, values
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

MAX_VALUES = 1 << 17
"""Limit of the values of a board. Memory is used only for existing values."""
_NAMES_AT = 8 * MAX_VALUES


class Series(NamedTuple):
    """One number of a metric. ``name``: the metric's name with ``_total``, ``_bucket`` or ``_sum``.

    ``mode``: how the gauges of several processes are merged; prometheus_client's ``multiprocess_mode``.
    """

    kind: str
    metric: str
    name: str
    label_names: tuple[str, ...] = ()
    label_values: tuple[str, ...] = ()
    mode: str = ""


_DECODER = msgspec.json.Decoder(Series)


class SharedValue:
    """Implements prometheus_client's interface of a value, without exemplars."""

    __slots__ = ("_index", "_lock", "_slots")

    def __init__(self, slots: Any, index: int) -> None:
        self._slots = slots
        self._index = index
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
    """One file in memory: float64 values, each written and read in one access, then a line of JSON for each value.

    Only one process at a time adds values. It writes the line before it uses the value.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """``descriptor``: of the file of another process, or of one that has ended."""
        if descriptor is None:
            descriptor = os.memfd_create("board of a worker")
            os.ftruncate(descriptor, _NAMES_AT)
        self.descriptor = descriptor
        self._slots: Any = memoryview(mmap.mmap(descriptor, _NAMES_AT)).cast("d")
        self._index: dict[Series, int] = {}
        self._end = _NAMES_AT
        """Of the lines that are read."""
        self._read_names()
        # No metric has these names, so they are not on the page.
        self.state, self.beats, self.needs_restart = (self.gauge(name) for name in ("state", "beats", "needs_restart"))
        self._cpu_s = self.value(Series("counter", "process_cpu_seconds", "process_cpu_seconds_total"))
        self._counted_cpu_s = 0.0

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        """A process that inherits the descriptor opens the same board."""
        return type(self), (self.descriptor,)

    def value(self, series: Series) -> SharedValue:
        """The value goes on if the board has it already. Values beyond the limit are not shown."""
        index = self._index.get(series)
        if index is None:
            index = min(len(self._index), MAX_VALUES - 1)
            if index < MAX_VALUES - 1:
                line = msgspec.json.encode(series) + b"\n"
                os.pwrite(self.descriptor, line, self._end)
                self._end += len(line)
                self._index[series] = index
        return SharedValue(self._slots, index)

    def gauge(self, name: str) -> SharedValue:
        return self.value(Series("gauge", name, name))

    def numbers(self) -> Iterator[tuple[Series, float]]:
        self._read_names()
        return ((series, self._slots[index]) for series, index in self._index.items())

    def beat(self) -> None:
        """Call it often: shows that the event loop runs, and what the operating system knows of this process."""
        self.beats.inc(1)
        self._cpu_s.inc((cpu_s := time.process_time()) - self._counted_cpu_s)
        self._counted_cpu_s = cpu_s
        for family in ProcessCollector(registry=None).collect():
            if family.type == "gauge" and family.name not in ("process_start_time_seconds", "process_max_fds"):
                self.gauge(family.name).set(family.samples[0].value)

    def clear(self) -> None:
        """Call it when the process of the board has ended: its gauges end with it."""
        self._read_names()
        os.ftruncate(self.descriptor, self._end)  # the process may have been killed while it wrote a line
        for series, index in self._index.items():
            if series.kind == "gauge":
                self._slots[index] = 0.0

    def keep_metrics(self) -> None:
        """Stores the values of all metrics that this process creates from now on, but not gauges without a mode.

        These describe Triton, and are the same in every process.
        """
        unshared: Any = values.MutexValue

        def value_of(*series_and_text: Any, multiprocess_mode: str = "", **_: object) -> Any:
            kind, metric, name, label_names, label_values, _text = series_and_text
            if kind == "gauge" and multiprocess_mode not in {"livesum", "livemax"}:
                return unshared(*series_and_text)
            return self.value(Series(kind, metric, name, tuple(label_names), tuple(label_values), multiprocess_mode))

        values.ValueClass = value_of

    def _read_names(self) -> None:
        """Reads the new complete lines."""
        size = os.fstat(self.descriptor).st_size
        lines, end, _ = os.pread(self.descriptor, size - self._end, self._end).rpartition(b"\n")
        self._end += len(lines) + len(end)
        for line in lines.splitlines():
            self._index[_DECODER.decode(line)] = len(self._index)


@dataclass(frozen=True, slots=True)
class PageOfAll(Collector):
    """``own``: the metrics of this process, whose values are on one of the boards.

    Without ``_created`` series. The numbers of the other processes are as old as their last write.
    """

    own: CollectorRegistry
    boards: Sequence[Board]

    def collect(self) -> Iterator[Metric]:
        """In the page's form: cumulative buckets of histograms, and a count."""
        totals: dict[Series, float] = {}
        for series, number in chain.from_iterable(board.numbers() for board in self.boards):
            known = totals.get(series, 0.0)
            totals[series] = max(known, number) if series.mode == "livemax" else known + number
        shared: defaultdict[str, list[Sample]] = defaultdict(list)
        below: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for series, number in totals.items():
            labels = dict(zip(series.label_names, series.label_values, strict=True))
            samples = shared[series.metric]
            if not series.name.endswith("_bucket"):
                samples.append(Sample(series.name, labels, number))
                continue
            histogram = series.metric, *series.label_values[:-1]
            below[histogram] += number
            samples.append(Sample(series.name, labels, below[histogram]))
            if labels["le"] == "+Inf":
                own = {name: value for name, value in labels.items() if name != "le"}
                samples.append(Sample(f"{series.metric}_count", own, below[histogram]))
        for family in self.own.collect():
            summed = Metric(family.name, family.documentation, family.type)
            unshared = [sample for sample in family.samples if not sample.name.endswith("_created")]
            summed.samples = shared.get(family.name, unshared)
            yield summed
