"""Several workers: their metrics as one page, a real parent whose workers exit early or hang, and their shares."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

import httpx
import psutil
import pytest
from prometheus_client import generate_latest, values
from prometheus_client.parser import text_string_to_metric_families

from app.admission.admission import Share
from app.core.errors import Outcome
from app.observability.metrics import DURATION_BOUNDS_S, Metrics, statistics_of
from app.process.workers import SHARED_OUT, Board, PageOfAll, check_shares, settings_of_worker
from app.settings import Settings, SettingsError
from app.triton import cancellation
from app.triton.cancellation import PacedCancels
from tests.toolkit.connections import workers_of
from tests.toolkit.processes import WITHOUT_TRITON, GatewayProcess, running_gateway
from tests.toolkit.waiting import PATIENCE_S, eventually

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]
OK = {"pipeline": "p", "transport": "unary", "outcome": "ok"}


def count_request(metrics: Metrics, pipeline: str, duration_s: float) -> None:
    series = metrics.of_pipeline(pipeline)
    series.requests("unary", Outcome.OK).inc()
    series.request_duration("unary", Outcome.OK).observe(duration_s)
    series.overhead("unary").observe(duration_s)


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
                count_request(self.metrics, pipeline, duration_s)

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


def test_one_worker_repairs_triton_at_a_time(first: Process, second: Process) -> None:
    with first.board.turn() as before, second.board.turn() as during:
        pass
    with second.board.turn() as after:
        assert (before, during, after) == (False, True, False)


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
    count_request(alone, "p", 0.003)
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


SERVE = """
import sys
from app import cli
from app.process import workers

workers.FIRST_DELAY_S = 0.01
workers.SILENCE_S = 1.0
{changed}
sys.exit(cli.main(["serve"]))
"""
CANNOT_START = 'workers.COMMAND = (sys.executable, "-c", "raise SystemExit(3)")'


def serving(folder: Path, changed: str = "", **settings: str) -> AbstractContextManager[GatewayProcess]:
    """Not as a fork, which would end without its last lines in the log."""
    program = ("-c", SERVE.format(changed=changed))
    return running_gateway(folder, ready=False, program=program, workers="2", **WITHOUT_TRITON, **settings)


def states(gateway: GatewayProcess) -> dict[str, str]:
    try:
        return dict(httpx.get(f"{gateway.admin_url}/health/ready").json()["workers"])
    except httpx.TransportError:
        return {}


def deaths(gateway: GatewayProcess) -> list[dict[str, object]]:
    return [line for line in gateway.json_lines() if "ended with status" in str(line["message"])]


PORT_TAKEN = """
import socket
from contextlib import nullcontext
real = workers.reserved
def reserved(*given):
    with real(*given) as port: pass
    socket.create_server(('127.0.0.1', port)).detach()
    return nullcontext(port)
workers.reserved = reserved
"""
"""A socket that does not share the port, between the check of the parent and the start of the workers."""


@pytest.mark.parametrize(
    ("changed", "status", "expected"),
    [
        (CANNOT_START, 3, "ended with status 3"),
        ('workers.COMMAND = ("/nowhere",)', 1, "worker 1 cannot be started: No such file or directory"),
        (PORT_TAKEN, 2, "GATEWAY_PORT: cannot listen on 127.0.0.1"),
    ],
    ids=["its program fails", "no program", "no port"],
)
def test_a_worker_that_cannot_start_ends_the_gateway_with_its_status(
    tmp_path: Path, changed: str, status: int, expected: str
) -> None:
    with serving(tmp_path, changed, explain="true") as gateway:
        assert gateway.process.wait(PATIENCE_S) == status
        assert "GATEWAY_EXPLAIN has no effect" in gateway.log
        assert expected in gateway.log
        assert "Traceback" not in gateway.log


def test_the_cpu_time_of_a_killed_worker_stays_counted_and_its_state_does_not_stay(tmp_path: Path) -> None:
    """Nobody reads the metrics before it is killed. It is not replaced."""
    with serving(tmp_path, "workers.FIRST_DELAY_S = 600.0") as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        killed, _ = workers_of(gateway)
        time.sleep(0.5)  # two heartbeats
        total_s = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in workers_of(gateway))
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(deaths(gateway)) == 1)
        page = httpx.get(f"{gateway.admin_url}/metrics").text.splitlines()
        (counted_s,) = (float(line.split()[1]) for line in page if line.startswith("process_cpu_seconds_total "))
        assert counted_s >= total_s - 0.1
        assert sorted(states(gateway).values()) == ["not_ready", "starting"]


@pytest.mark.full
def test_a_worker_that_does_not_start_again_is_retried(tmp_path: Path) -> None:
    """The other worker accepts all connections."""
    never_again = (
        "clear = workers.Board.clear\n"
        "def cleared(self, number):\n"
        "    clear(self, number)\n"
        f"    {CANNOT_START}\n"
        "workers.Board.clear = cleared\n"
    )
    with serving(tmp_path, never_again) as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        os.kill(workers_of(gateway)[1], signal.SIGKILL)
        eventually(lambda: len(deaths(gateway)) > 6)
        assert sorted(states(gateway).values()) == ["not_ready", "starting"]
        for _ in range(16):
            assert httpx.get(f"{gateway.url}/health/live").status_code == 200


@pytest.mark.full
def test_a_hung_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        hung, _ = workers_of(gateway)
        os.kill(hung, signal.SIGSTOP)
        eventually(lambda: "does not respond and is killed" in gateway.log)
        eventually(lambda: len(deaths(gateway)) == 1)
        eventually(lambda: set(states(gateway).values()) == {"not_ready"})
        assert hung not in workers_of(gateway)
        (line,) = deaths(gateway)
        assert str(line["message"]).endswith("ended with status -9 and is replaced")
        assert line["pid"] == hung


@pytest.mark.full
def test_a_stop_during_the_start_ends_all_workers(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        eventually(lambda: states(gateway) != {})
        workers = workers_of(gateway)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(PATIENCE_S) == 0
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_the_shares_add_up_to_the_total(workers: int) -> None:
    """Those of the limits, and of the shared memory with its default. Other settings are unchanged."""
    settings = Settings(workers=workers, max_connections=100, max_bytes_in_flight=268_435_457, embedded=True)
    shares = [settings_of_worker(settings, Share(number, workers)) for number in range(1, workers + 1)]
    for name in SHARED_OUT:
        values = [getattr(share, name) for share in shares]
        assert sum(values) == getattr(settings, name)
        assert max(values) - min(values) <= 1
    changed = {name for name in Settings.model_fields if getattr(shares[0], name) != getattr(settings, name)}
    assert changed == {*SHARED_OUT}


def test_a_share_that_is_too_small_is_an_error() -> None:
    settings = {"max_body_bytes": 64 * 1024 * 1024, "max_bytes_in_flight": 256 * 1024 * 1024}
    check_shares(Settings(workers=4, max_connections=4, **settings))
    with pytest.raises(SettingsError, match="each of the 5 workers needs at least 67108864, GATEWAY_MAX_BODY_BYTES"):
        check_shares(Settings(workers=5, **settings))
    with pytest.raises(SettingsError, match="GATEWAY_MAX_CONNECTIONS is 3: each of the 4 workers needs at least 1"):
        check_shares(Settings(workers=4, max_connections=3))


def test_all_workers_together_have_the_rate_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the size of the burst and the rate after the burst."""
    monkeypatch.setattr(cancellation.time, "monotonic", lambda: 1000.0)
    alone, workers = PacedCancels(), [PacedCancels(4) for _ in range(4)]
    turns = sorted(worker.turn() for worker in workers for _ in range(100))
    expected = [alone.turn() for _ in range(400)]
    assert sum(turn <= 1000.0 for turn in turns) <= sum(turn <= 1000.0 for turn in expected)
    assert turns[-1] == pytest.approx(expected[-1])
