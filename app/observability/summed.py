"""The joined metrics of the supervisor and its workers."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from app.observability.shared_values import Series, as_shown

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
