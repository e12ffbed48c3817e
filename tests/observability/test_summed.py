"""The summed metrics of a supervisor and its workers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.parser import text_string_to_metric_families

from app.core.errors import Outcome
from app.observability import worker_metrics
from app.observability.metrics import DURATION_BOUNDS_S, Metrics
from app.observability.statistics import statistics_of
from app.observability.worker_metrics import Descriptors, MetricsReader, Series, SummedMetrics, Writer

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Worker:
    """The metrics of a worker. The workers of these tests live in one process."""

    def __init__(self) -> None:
        descriptors = Descriptors.create()
        self._writer = Writer(descriptors)
        self.reader = MetricsReader(descriptors)
        with self.acts():
            self.metrics = Metrics("1")

    @contextmanager
    def acts(self) -> Iterator[None]:
        """Series that are created in this block belong to this worker."""
        value_class = values.ValueClass
        self._writer.use()
        try:
            yield
        finally:
            values.ValueClass = value_class

    def answers(self, pipeline: str, *durations_s: float) -> None:
        with self.acts():
            for duration_s in durations_s:
                self.metrics.of_pipeline(pipeline).count_request("unary", Outcome.OK, duration_s, 0.0)


def page_of(own: Metrics, *workers: Worker, summed: SummedMetrics | None = None) -> Page:
    registry = CollectorRegistry()
    registry.register(summed or SummedMetrics(own.registry, lambda: [each.reader.read() for each in workers]))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        if not family.name.startswith("process_")  # values of this process, which change between reads
        for sample in family.samples
    }


def number(page: Page, name: str, **labels: str) -> float | None:
    return page.get((f"triton_gateway_{name}", frozenset(labels.items())))


OK = {"pipeline": "p", "transport": "unary", "outcome": "ok"}


def test_counters_and_histograms_are_sums() -> None:
    own, first, second = Metrics("1"), Worker(), Worker()
    own.of_pipeline("p").count_request("unary", Outcome.OK, 0.3, 0.0)
    first.answers("p", 0.003, 0.3)
    second.answers("p", 0.003, 700.0)
    second.answers("q", 0.1)
    page = page_of(own, first, second)
    assert number(page, "requests_total", **OK) == 5
    assert number(page, "requests_total", **OK | {"pipeline": "q"}) == 1
    buckets = [number(page, "request_duration_seconds_bucket", **OK, le=le) for le in ("0.001", "0.005", "0.5", "+Inf")]
    assert buckets == [0, 2, 4, 5]
    assert number(page, "request_duration_seconds_count", **OK) == 5
    assert number(page, "request_duration_seconds_sum", **OK) == pytest.approx(700.606)


def test_a_page_of_workers_has_the_series_of_one_process() -> None:
    """Compares all values except the times of creation, which are not shared."""
    alone, own, first, second = Metrics("1"), Metrics("1"), Worker(), Worker()
    alone.of_pipeline("p").count_request("unary", Outcome.OK, 0.003, 0.002)
    alone.in_flight.labels("p").set(0)
    first.answers("p", 0.003)
    with second.acts():
        second.metrics.in_flight.labels("p").set(0)
    series = {key for key in page_of(alone) if not key[0].endswith("_created")}
    assert set(page_of(own, first, second)) == series


def test_counters_of_an_ended_worker_stay_and_its_gauges_go() -> None:
    own, first, second = Metrics("1"), Worker(), Worker()
    running = [first, second]
    summed = SummedMetrics(own.registry, lambda: [each.reader.read() for each in running])
    for each in running:
        each.answers("p", 0.003, 0.3)
        with each.acts():
            each.metrics.in_flight.labels("p").inc()
    page = page_of(own, summed=summed)
    assert (number(page, "requests_total", **OK), number(page, "in_flight_requests", pipeline="p")) == (4, 2)
    running.remove(first)
    summed.keep(first.reader.read())
    page = page_of(own, summed=summed)
    assert (number(page, "requests_total", **OK), number(page, "in_flight_requests", pipeline="p")) == (4, 1)
    assert number(page, "request_duration_seconds_bucket", **OK, le="0.005") == 2
    assert number(page, "request_duration_seconds_count", **OK) == 4


def test_gauges_about_triton_come_from_the_supervisor() -> None:
    own, first = Metrics("1"), Worker()
    with first.acts():
        first.metrics.triton_up.set(0)
        first.metrics.model_ready.labels("m").set(0)
    own.triton_up.set(1)
    page = page_of(own, first)
    assert (number(page, "triton_up"), number(page, "model_ready", model="m")) == (1, None)
    assert number(page, "build_info", version="1") == 1


def test_a_reload_that_failed_in_one_worker_is_shown() -> None:
    own, first, second = Metrics("1"), Worker(), Worker()
    assert number(page_of(own, first, second), "config_reload_failed") == 0
    second.metrics.config_reload_failed.set(1)
    assert number(page_of(own, first, second), "config_reload_failed") == 1


def test_a_worker_killed_during_a_write_keeps_sums_valid() -> None:
    """The buckets of the next worker are added to the incomplete buckets of the killed worker."""
    own, other = Metrics("1"), Worker()
    other.answers("p", 0.003, 0.3)
    summed = SummedMetrics(own.registry, list)
    whole = other.reader.read()
    summed.keep(dict.fromkeys(list(whole)[:9], 0.0))
    summed.keep(whole)
    page = page_of(own, summed=summed)
    assert page == page_of(own, other)


def test_an_incomplete_line_of_a_killed_worker_is_ignored() -> None:
    descriptors = Descriptors.create()
    writer, reader = Writer(descriptors), MetricsReader(descriptors)
    first = Series("counter", "m", "m_total", ("l",), ("line\nbreak",))
    writer.value(first).inc(2.5)
    os.write(descriptors.names, b'["counter","m","m_to')
    assert reader.read() == {first: 2.5}
    os.write(descriptors.names, b'tal",["l"],["x"],""]\n')
    assert list(reader.read().values()) == [2.5, 0.0]


def test_a_recreated_series_keeps_its_place() -> None:
    descriptors = Descriptors.create()
    writer, reader = Writer(descriptors), MetricsReader(descriptors)
    series = Series("gauge", "g", "g", (), (), "livesum")
    writer.value(series).set(1)
    again = writer.value(series)
    assert again.get() == 1
    again.set(7)
    assert reader.read() == {series: 7}


def test_series_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_metrics, "MAX_VALUES", 3)
    descriptors = Descriptors.create()
    writer, reader = Writer(descriptors), MetricsReader(descriptors)
    for name in "abcde":
        writer.value(Series("counter", name, name, (), ())).inc(1)
    assert [series.name for series in reader.read()] == ["a", "b"]


def test_values_of_a_killed_process_stay_readable() -> None:
    descriptors = Descriptors.create()
    script = (
        "import os, sys\n"
        "from app.observability.worker_metrics import Descriptors, Series, Writer\n"
        "writer = Writer(Descriptors(*map(int, sys.argv[1:])))\n"
        "writer.value(Series('counter', 'm', 'm_total', (), ())).inc(3)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    numbers = descriptors.values, descriptors.names
    subprocess.run([sys.executable, "-c", script, *map(str, numbers)], pass_fds=numbers, check=False)
    assert list(MetricsReader(descriptors).read().values()) == [3]


def test_statistics_are_sums_over_the_workers() -> None:
    own, workers = Metrics("1"), [Worker(), Worker()]
    workers[0].answers("p", 0.002, 0.2)
    workers[1].answers("p", 0.2)
    registry = CollectorRegistry()
    registry.register(SummedMetrics(own.registry, lambda: [each.reader.read() for each in workers]))
    unary = statistics_of(registry).pipelines["p"].unary
    assert unary.outcomes == {"ok": 3}
    assert unary.durations[DURATION_BOUNDS_S.index(0.0025)] == 1
    assert unary.durations[DURATION_BOUNDS_S.index(0.25)] == unary.durations[-1] == 3
