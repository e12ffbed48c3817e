"""CPU time, memory and open files of the gateway and its workers."""

import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from app.observability.metrics import ProcessMetrics, cpu_series, numbers_of
from app.observability.worker_metrics import Descriptors, MetricsReader, SummedMetrics, Writer

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


def test_memory_and_files_of_workers_are_added() -> None:
    metrics = ProcessMetrics()
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        metrics.workers = lambda: [worker.pid]
        alone, together, of_worker = values_of(ProcessMetrics()), values_of(metrics), numbers_of(worker.pid)
        assert together["process_open_fds"] >= alone["process_open_fds"] + 3
        assert together["process_resident_memory_bytes"] > of_worker["process_resident_memory_bytes"]
        assert together["process_max_fds"] == alone["process_max_fds"]
        worker.communicate("")
    assert numbers_of(worker.pid) == {}


def test_the_cpu_time_of_workers_does_not_depend_on_their_process_ids() -> None:
    """A new process may get the id of an ended worker, with less CPU time: the counter must not fall."""
    metrics, running = ProcessMetrics(), [Worker(), Worker()]
    metrics.workers = lambda: [os.getpid()] * len(running)
    registry = CollectorRegistry()
    registry.register(metrics)
    summed = SummedMetrics(registry, lambda: [worker.reader.read() for worker in running])
    for worker, cpu_s in zip(running, (1000.0, 2000.0), strict=True):
        worker.cpu_s.set(cpu_s)
    before = cpu_s_of(summed)
    assert 3000 < before < 4000
    running[0].cpu_s.set(1500.0)
    ended = running.pop(0)
    summed.keep(ended.reader.read())
    running.append(Worker())
    assert cpu_s_of(summed) - before == pytest.approx(500, abs=1)


class Worker:
    def __init__(self) -> None:
        descriptors = Descriptors.create()
        self.cpu_s = Writer(descriptors).value(cpu_series())
        self.reader = MetricsReader(descriptors)


def cpu_s_of(summed: SummedMetrics) -> float:
    (family,) = (family for family in summed.collect() if family.name == "process_cpu_seconds")
    (sample,) = family.samples
    return float(sample.value)
