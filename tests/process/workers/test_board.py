"""The metrics of several processes as one page."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from prometheus_client import generate_latest, values
from prometheus_client.parser import text_string_to_metric_families

from app.core.errors import Outcome
from app.observability.metrics import DURATION_BOUNDS_S, Metrics, statistics_of
from app.process.workers.worker import Board, PageOfAll

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]
OK = {"pipeline": "p", "transport": "unary", "outcome": "ok"}


class Process:
    """The metrics of a worker. The workers of these tests live in one process."""

    boards: ClassVar[list[Board]] = []

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.board = Board(folder, 3)
        self.boards.append(self.board)
        value_class = values.ValueClass
        self.board.keep_metrics(number)
        self._value_class, values.ValueClass = values.ValueClass, value_class
        with self.acts():
            self.metrics = Metrics("1")

    @contextmanager
    def acts(self) -> Iterator[None]:
        """Series that are created in this block belong to this worker."""
        value_class, values.ValueClass = values.ValueClass, self._value_class
        try:
            yield
        finally:
            values.ValueClass = value_class

    def answers(self, pipeline: str, *durations_s: float) -> None:
        with self.acts():
            for duration_s in durations_s:
                self.metrics.of_pipeline(pipeline).count_request("unary", Outcome.OK, duration_s, 0.0)

    def runs(self, count: int) -> None:
        with self.acts():
            self.metrics.in_flight.labels("p").set(count)

    @property
    def page(self) -> Page:
        """Without values of the process, which change between reads."""
        page = generate_latest(PageOfAll(self.metrics.registry, self.folder)).decode()
        families = text_string_to_metric_families(page)
        own = [family for family in families if not family.name.startswith("process_")]
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value for family in own for sample in family.samples
        }

    def number_of(self, name: str, **labels: str) -> float | None:
        return self.page.get((f"triton_gateway_{name}", frozenset(labels.items())))


@pytest.fixture(autouse=True)
def closed_files() -> Iterator[None]:
    yield
    while Process.boards:
        for file in Process.boards.pop().files.values():
            file._f.close()


@pytest.fixture
def first(tmp_path: Path) -> Process:
    return Process(tmp_path, 1)


@pytest.fixture
def second(tmp_path: Path) -> Process:
    return Process(tmp_path, 2)


def test_counters_and_histograms_are_sums(first: Process, second: Process) -> None:
    third = Process(first.folder, 3)
    first.answers("p", 0.3)
    second.answers("p", 0.003, 0.3)
    third.answers("p", 0.003, 700.0)
    third.answers("q", 0.1)
    assert first.page == third.page
    assert first.number_of("requests_total", **OK) == 5
    assert first.number_of("requests_total", **OK | {"pipeline": "q"}) == 1
    bounds = ("0.001", "0.005", "0.5", "+Inf")
    assert [first.number_of("request_duration_seconds_bucket", **OK, le=le) for le in bounds] == [0, 2, 4, 5]
    assert first.number_of("request_duration_seconds_count", **OK) == 5
    assert first.number_of("request_duration_seconds_sum", **OK) == pytest.approx(700.606)
    unary = statistics_of(PageOfAll(first.metrics.registry, first.folder)).pipelines["p"].unary
    assert unary.outcomes == {"ok": 5}
    assert [unary.durations[DURATION_BOUNDS_S.index(bound)] for bound in (0.005, 0.5)] == [2, 4]


def test_a_page_of_several_has_the_series_of_one_process(first: Process, second: Process) -> None:
    """Compares all series except the times of creation, which are not shared."""
    alone = Metrics("1")
    alone.of_pipeline("p").count_request("unary", Outcome.OK, 0.003, 0.002)
    alone.in_flight.labels("p").set(0)
    first.answers("p", 0.003)
    second.runs(0)
    series = {
        (sample.name, frozenset(sample.labels.items()))
        for family in text_string_to_metric_families(generate_latest(alone.registry).decode())
        for sample in family.samples
        if not family.name.startswith("process_") and not sample.name.endswith("_created")
    }
    assert set(first.page) == set(second.page) == series


def test_the_next_process_goes_on_with_counters_and_not_with_gauges(first: Process, second: Process) -> None:
    for each in (first, second):
        each.answers("p", 0.003, 0.3)
        each.runs(1)
    assert (first.number_of("requests_total", **OK), first.number_of("in_flight_requests", pipeline="p")) == (4, 2)
    second.board.clear(1)
    assert (second.number_of("requests_total", **OK), second.number_of("in_flight_requests", pipeline="p")) == (4, 1)
    next_one = Process(first.folder, 1)
    next_one.answers("p", 0.003)
    next_one.answers("q", 0.003)
    for each in (second, next_one):
        assert (each.number_of("requests_total", **OK), each.number_of("in_flight_requests", pipeline="p")) == (5, 1)
        assert each.number_of("requests_total", **OK | {"pipeline": "q"}) == 1
        assert each.number_of("request_duration_seconds_bucket", **OK, le="0.005") == 3
        assert each.number_of("request_duration_seconds_count", **OK) == 5


def test_gauges_about_triton_are_those_of_the_process_that_answers(first: Process, second: Process) -> None:
    for each, up in ((first, 1), (second, 0)):
        with each.acts():
            each.metrics.triton_up.set(up)
            each.metrics.model_ready.labels("m").set(up)
    for each, up in ((first, 1), (second, 0)):
        assert (each.number_of("triton_up"), each.number_of("model_ready", model="m")) == (up, up)
        assert each.number_of("build_info", version="1") == 1


def test_a_reload_that_failed_in_one_process_is_shown(first: Process, second: Process) -> None:
    assert first.number_of("config_reload_failed") == 0
    second.metrics.config_reload_failed.set(1)
    assert first.number_of("config_reload_failed") == 1


def test_values_of_a_killed_process_stay_readable(first: Process) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from app.observability.metrics import Metrics\n"
        "from app.process.workers.worker import Board\n"
        "board = Board(Path(sys.argv[1]), 3)\n"
        "board.keep_metrics(2)\n"
        "Metrics('1').requests.labels('p', 'unary', 'ok').inc(3)\n"
        "board.statuses[2].state = 2\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(first.folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert first.number_of("requests_total", **OK) == 3
    assert first.board.statuses[2].state == 2
    first.board.clear(2)
    assert first.number_of("requests_total", **OK) == 3
    assert first.board.statuses[2].state == 0


def test_cpu_time_and_memory_are_sums_over_the_processes(first: Process, second: Process) -> None:
    def shown() -> dict[str, float]:
        families = PageOfAll(first.metrics.registry, first.folder).collect()
        return {family.name: family.samples[0].value for family in families if family.name.startswith("process_")}

    with first.acts():
        first.board.beat()
    one = shown()
    with second.acts():
        second.board.beat()
    two = shown()
    for name in ("process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"):
        assert two[name] == pytest.approx(2 * one[name], rel=0.1)
    for name in ("process_start_time_seconds", "process_max_fds"):
        assert two[name] == one[name]
    first.board.clear(1)
    assert shown()["process_cpu_seconds"] == two["process_cpu_seconds"]
    assert shown()["process_open_fds"] == pytest.approx(two["process_open_fds"] / 2, rel=0.1)
