"""The metrics of several processes as one page."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import generate_latest, values
from prometheus_client.parser import text_string_to_metric_families

from app.core.errors import Outcome
from app.observability.metrics import DURATION_BOUNDS_S, Metrics
from app.observability.statistics import statistics_of
from app.process.workers import board as boards
from app.process.workers.board import Board, PageOfAll, Series

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Process:
    """The metrics of a worker. The workers of these tests live in one process."""

    def __init__(self, board: Board | None = None) -> None:
        """``board``: of a process that has ended."""
        self.board = board or Board()
        with self.acts():
            self.metrics = Metrics("1")

    @contextmanager
    def acts(self) -> Iterator[None]:
        """Series that are created in this block belong to this worker."""
        value_class = values.ValueClass
        self.board.keep_metrics()
        try:
            yield
        finally:
            values.ValueClass = value_class

    def answers(self, pipeline: str, *durations_s: float) -> None:
        with self.acts():
            for duration_s in durations_s:
                self.metrics.of_pipeline(pipeline).count_request("unary", Outcome.OK, duration_s, 0.0)


def page_of(own: Process, *others: Process) -> Page:
    page = PageOfAll(own.metrics.registry, [own.board, *[each.board for each in others]])
    families = text_string_to_metric_families(generate_latest(page).decode())
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
    first, second, third = Process(), Process(), Process()
    first.answers("p", 0.3)
    second.answers("p", 0.003, 0.3)
    third.answers("p", 0.003, 700.0)
    third.answers("q", 0.1)
    page = page_of(first, second, third)
    assert page == page_of(third, first, second)
    assert number(page, "requests_total", **OK) == 5
    assert number(page, "requests_total", **OK | {"pipeline": "q"}) == 1
    buckets = [number(page, "request_duration_seconds_bucket", **OK, le=le) for le in ("0.001", "0.005", "0.5", "+Inf")]
    assert buckets == [0, 2, 4, 5]
    assert number(page, "request_duration_seconds_count", **OK) == 5
    assert number(page, "request_duration_seconds_sum", **OK) == pytest.approx(700.606)


def test_a_page_of_several_has_the_series_of_one_process() -> None:
    """Compares all series except the times of creation, which are not shared."""
    alone, first, second = Metrics("1"), Process(), Process()
    alone.of_pipeline("p").count_request("unary", Outcome.OK, 0.003, 0.002)
    alone.in_flight.labels("p").set(0)
    first.answers("p", 0.003)
    with second.acts():
        second.metrics.in_flight.labels("p").set(0)
    families = text_string_to_metric_families(generate_latest(alone.registry).decode())
    series = {
        (sample.name, frozenset(sample.labels.items()))
        for family in families
        for sample in family.samples
        if not family.name.startswith("process_") and not sample.name.endswith("_created")
    }
    assert set(page_of(first, second)) == set(page_of(second, first)) == series


def test_the_next_process_goes_on_with_counters_and_not_with_gauges() -> None:
    first, second = Process(), Process()
    for each in (first, second):
        each.answers("p", 0.003, 0.3)
        with each.acts():
            each.metrics.in_flight.labels("p").inc()
    page = page_of(first, second)
    assert (number(page, "requests_total", **OK), number(page, "in_flight_requests", pipeline="p")) == (4, 2)
    first.board.clear()
    page = page_of(second, first)
    assert (number(page, "requests_total", **OK), number(page, "in_flight_requests", pipeline="p")) == (4, 1)
    next_one = Process(Board(first.board.descriptor))
    next_one.answers("p", 0.003)
    next_one.answers("q", 0.003)
    for page in (page_of(second, next_one), page_of(next_one, second), page_of(second, first)):
        assert (number(page, "requests_total", **OK), number(page, "in_flight_requests", pipeline="p")) == (5, 1)
        assert number(page, "requests_total", **OK | {"pipeline": "q"}) == 1 or page == page_of(second, first)
        assert number(page, "request_duration_seconds_bucket", **OK, le="0.005") == 3
        assert number(page, "request_duration_seconds_count", **OK) == 5


def test_gauges_about_triton_are_those_of_the_process_that_answers() -> None:
    first, second = Process(), Process()
    for each, up in ((first, 1), (second, 0)):
        each.metrics.triton_up.set(up)
        each.metrics.model_ready.labels("m").set(up)
    for own, other, up in ((first, second, 1), (second, first, 0)):
        page = page_of(own, other)
        assert (number(page, "triton_up"), number(page, "model_ready", model="m")) == (up, up)
        assert number(page, "build_info", version="1") == 1


def test_a_reload_that_failed_in_one_process_is_shown() -> None:
    first, second = Process(), Process()
    assert number(page_of(first, second), "config_reload_failed") == 0
    second.metrics.config_reload_failed.set(1)
    assert number(page_of(first, second), "config_reload_failed") == 1


def test_a_process_killed_while_it_created_a_histogram_keeps_sums_valid() -> None:
    """The next one creates the buckets that are missing."""
    whole, other = Process(), Process()
    for each in (whole, other):
        each.answers("p", 0.003, 0.3)
    killed = Board()
    for series, _ in list(whole.board.numbers())[:-9]:
        killed.value(series)
    killed.clear()
    next_one = Process(Board(killed.descriptor))
    next_one.answers("p", 0.003, 0.3)
    assert page_of(next_one, other) == page_of(whole, other)


def test_an_incomplete_line_of_a_killed_process_is_ignored_and_then_removed() -> None:
    killed = Board()
    reader = Board(killed.descriptor)
    first, second = (Series("counter", name, f"{name}_total", ("l",), ("line\nbreak",)) for name in "ab")
    killed.value(first).inc(2.5)
    os.pwrite(killed.descriptor, b'["counter","m","m_to', os.fstat(killed.descriptor).st_size)
    assert counters_of(reader) == {first: 2.5}
    reader.clear()
    Board(killed.descriptor).value(second).inc(1)
    assert counters_of(reader) == {first: 2.5, second: 1}


def counters_of(board: Board) -> dict[Series, float]:
    return {series: number for series, number in board.numbers() if series.metric in "abcdem"}


def test_a_recreated_series_keeps_its_place() -> None:
    board = Board()
    series = Series("gauge", "a", "a", mode="livesum")
    board.value(series).set(1)
    again = board.value(series)
    assert again.get() == 1
    again.set(7)
    assert counters_of(board) == {series: 7}


def test_series_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    monkeypatch.setattr(boards, "MAX_VALUES", len(list(board.numbers())) + 3)
    for name in "abcde":
        board.value(Series("counter", name, name)).inc(1)
    assert [series.name for series in counters_of(board)] == ["a", "b"]


def test_values_of_a_killed_process_stay_readable() -> None:
    board = Board()
    script = (
        "import os, sys\n"
        "from app.process.workers.board import Board, Series\n"
        "Board(int(sys.argv[1])).value(Series('counter', 'm', 'm_total')).inc(3)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(board.descriptor)]
    subprocess.run(command, pass_fds=[board.descriptor], check=False)
    assert list(counters_of(board).values()) == [3]


def test_statistics_are_sums_over_the_processes() -> None:
    first, second = Process(), Process()
    first.answers("p", 0.002, 0.2)
    second.answers("p", 0.2)
    unary = statistics_of(PageOfAll(first.metrics.registry, [first.board, second.board])).pipelines["p"].unary
    assert unary.outcomes == {"ok": 3}
    assert unary.durations[DURATION_BOUNDS_S.index(0.0025)] == 1
    assert unary.durations[DURATION_BOUNDS_S.index(0.25)] == unary.durations[-1] == 3


def test_cpu_time_and_memory_are_sums_over_the_processes() -> None:
    first, second = Process(), Process()
    page = PageOfAll(first.metrics.registry, [first.board, second.board])
    first.board.beat()
    one = {family.name: family.samples[0].value for family in page.collect() if family.name.startswith("process_")}
    second.board.beat()
    two = {family.name: family.samples[0].value for family in page.collect() if family.name.startswith("process_")}
    for name in ("process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"):
        assert two[name] == pytest.approx(2 * one[name], rel=0.1)
    for name in ("process_start_time_seconds", "process_max_fds"):
        assert two[name] == one[name]
    first.board.clear()
    ended = {family.name: family.samples[0].value for family in page.collect() if family.name.startswith("process_")}
    assert ended["process_cpu_seconds"] == two["process_cpu_seconds"]
    assert ended["process_open_fds"] == two["process_open_fds"] / 2
