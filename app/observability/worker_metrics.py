"""Stores metrics in memory that a worker shares with its supervisor, so that they survive the worker.

A worker writes its metrics with ``Writer``; the supervisor reads them with ``MetricsReader`` and joins them with its
own in ``SummedMetrics``. docs/decisions/0028-workers.md explains why prometheus_client's multiprocess mode is not used.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, values
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

MAX_VALUES = 1 << 20
"""Limit of the shared values. Memory is used only for existing values."""
_VALUE_BYTES = 8

Slots = Any
"""A ``memoryview`` of float64; typed as Any, because memoryview's type assumes integers."""


class Series(NamedTuple):
    """One number of a metric. ``name``: the metric's name with ``_total``, ``_bucket`` or ``_sum``.

    ``mode``: how the gauges of several processes are merged; prometheus_client's ``multiprocess_mode``.
    """

    kind: str
    metric: str
    name: str
    label_names: tuple[str, ...]
    label_values: tuple[str, ...]
    mode: str = ""

    @property
    def labels(self) -> dict[str, str]:
        return dict(zip(self.label_names, self.label_values, strict=True))

    @property
    def is_shared(self) -> bool:
        """Gauges without a mode describe Triton or the process itself, and are separate for each process."""
        return self.kind != "gauge" or self.mode in {"livesum", "livemax"}


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The descriptors of two files in memory.

    ``values`` has one float64 for each series, ``names`` one line of JSON for each series, in the same order. A value
    is written and read in one access of 8 bytes; its line is written before the value is used.
    """

    values: int
    names: int

    @classmethod
    def create(cls) -> "Descriptors":
        created = cls(os.memfd_create("metric values"), os.memfd_create("metric names"))
        os.ftruncate(created.values, MAX_VALUES * _VALUE_BYTES)
        return created

    def mapped(self) -> Slots:
        return memoryview(mmap.mmap(self.values, MAX_VALUES * _VALUE_BYTES)).cast("d")

    def close(self) -> None:
        os.close(self.values)
        os.close(self.names)


class Writer:
    """The worker's side."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._names = descriptors.names
        self._slots = descriptors.mapped()
        self._index: dict[Series, int] = {}

    def value(self, series: Series) -> "SharedValue":
        return SharedValue(self._slots, self._index_of(series))

    def use(self) -> None:
        """Stores the values of all metrics that this process creates from now on."""
        values.ValueClass = self._value_class()

    def _value_class(self) -> Any:
        unshared: Any = values.MutexValue

        def value_of(*series_and_text: Any, multiprocess_mode: str = "", **_: object) -> Any:
            kind, metric, name, label_names, label_values, _text = series_and_text
            series = Series(kind, metric, name, tuple(label_names), tuple(label_values), multiprocess_mode)
            return self.value(series) if series.is_shared else unshared(*series_and_text)

        return value_of

    def _index_of(self, series: Series) -> int:
        """Returns the same index for a series that is removed and created again."""
        index = self._index.get(series)
        if index is None:
            index = self._index[series] = min(len(self._index), MAX_VALUES - 1)
            if index < MAX_VALUES - 1:
                os.write(self._names, msgspec.json.encode(series) + b"\n")
        return index


class SharedValue:
    """Implements prometheus_client's interface of a value, without exemplars."""

    __slots__ = ("_index", "_lock", "_slots")

    def __init__(self, slots: Slots, index: int) -> None:
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


class MetricsReader:
    """The supervisor's side. It also works after the worker was killed."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._slots = descriptors.mapped()
        self._series: list[Series] = []
        self._position = 0

    def read(self) -> dict[Series, float]:
        self._read_names()
        return {series: self._slots[index] for index, series in enumerate(self._series)}

    def close(self) -> None:
        self._slots.release()
        self._descriptors.close()

    def _read_names(self) -> None:
        """Reads the new complete lines."""
        size = os.fstat(self._descriptors.names).st_size
        lines, end, _ = os.pread(self._descriptors.names, size - self._position, self._position).rpartition(b"\n")
        self._position += len(lines) + len(end)
        self._series += [_DECODER.decode(line) for line in lines.splitlines()]


_DECODER = msgspec.json.Decoder(Series)


def as_shown(numbers: Mapping[Series, float]) -> Iterator[tuple[Series, float]]:
    """Converts numbers to the page's form: cumulative buckets of histograms, and a count."""
    below: dict[tuple[str, ...], float] = {}
    for series, number in numbers.items():
        if not series.name.endswith("_bucket"):
            yield series, number
            continue
        histogram = series.metric, *series.label_values[:-1]
        total = below[histogram] = below.get(histogram, 0.0) + number
        yield series, total
        if series.label_values[-1] == "+Inf":
            yield _count_of(series), total


def _count_of(bucket: Series) -> Series:
    name, label_names = f"{bucket.metric}_count", bucket.label_names[:-1]
    return bucket._replace(name=name, label_names=label_names, label_values=bucket.label_values[:-1])


Numbers = dict[Series, float]
_Labels = tuple[tuple[str, str], ...]


class SummedMetrics(Collector):
    """The supervisor's metrics, and the sums over its workers.

    ``running``: the numbers of each running worker. :meth:`keep` keeps the counters and histograms of workers that have
    ended, so that counters never decrease. There are no ``_created`` series.
    """

    def __init__(self, own: CollectorRegistry, running: Callable[[], Iterable[Numbers]]) -> None:
        self._own = own
        self._running = running
        self._ended: Numbers = {}

    def keep(self, numbers: Numbers) -> None:
        """Adds the last numbers of a worker that has ended."""
        for series, number in numbers.items():
            if series.kind != "gauge":
                self._ended[series] = self._ended.get(series, 0.0) + number

    def collect(self) -> Iterator[Metric]:
        by_metric = self._by_metric()
        for family in self._own.collect():
            samples = {_key(sample): sample.value for sample in family.samples if not sample.name.endswith("_created")}
            for series, number in by_metric.get(family.name, ()):
                key = series.name, tuple(series.labels.items())
                samples[key] = _joined(series, samples.get(key, 0.0), number)
            summed = Metric(family.name, family.documentation, family.type)
            summed.samples = [Sample(name, dict(labels), value) for (name, labels), value in samples.items()]
            yield summed

    def _by_metric(self) -> dict[str, list[tuple[Series, float]]]:
        found: dict[str, list[tuple[Series, float]]] = {}
        for numbers in chain([self._ended], self._running()):
            for series, number in as_shown(numbers):
                found.setdefault(series.metric, []).append((series, number))
        return found


def _key(sample: Sample) -> tuple[str, _Labels]:
    return sample.name, tuple(sample.labels.items())


def _joined(series: Series, sum_: float, number: float) -> float:
    return max(sum_, number) if series.mode == "livemax" else sum_ + number
