"""CPU time, memory and open files of the gateway and its workers."""

import subprocess
import sys

from app.observability.processes import ProcessMetrics, numbers_of

BUSY = "sum(n * n for n in range(1_000_000)); print(flush=True); input()"


def values_of(metrics: ProcessMetrics) -> dict[str, float]:
    return {sample.name: sample.value for family in metrics.collect() for sample in family.samples}


def test_one_process_has_its_own_numbers() -> None:
    values = values_of(ProcessMetrics())
    assert set(values) == {
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
    }
    assert min(values.values()) > 0


def test_workers_are_added_and_ended_workers_keep_their_cpu_time() -> None:
    metrics = ProcessMetrics()
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        metrics.workers = lambda: [worker.pid]
        alone, together, of_worker = values_of(ProcessMetrics()), values_of(metrics), numbers_of(worker.pid)
        assert of_worker["process_cpu_seconds"] > 0
        assert together["process_cpu_seconds_total"] >= (
            alone["process_cpu_seconds_total"] + of_worker["process_cpu_seconds"]
        )
        assert together["process_open_fds"] >= alone["process_open_fds"] + 3
        assert together["process_resident_memory_bytes"] > of_worker["process_resident_memory_bytes"]
        assert together["process_max_fds"] == alone["process_max_fds"]
        worker.communicate("")
    assert values_of(metrics)["process_cpu_seconds_total"] >= together["process_cpu_seconds_total"]
    assert numbers_of(worker.pid) == {}
