"""The ``process_*`` metrics: CPU time, memory and open files of the gateway, including its workers."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from app.observability.shared_values import Series

CPU = "process_cpu_seconds"
ADDED = {"process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds"}


class ProcessMetrics(Collector):
    """``process_max_fds`` and ``process_start_time_seconds`` are those of this process; memory and files are sums.

    The CPU time is that of this process: each worker counts its own among its shared values (:func:`cpu_series`), which
    belong to one worker even if its process id is used again, and which stay when it ends.
    """

    def __init__(self) -> None:
        self.workers: Callable[[], Iterable[int]] = tuple
        """Returns the process ids of the running workers."""

    def collect(self) -> Iterator[Metric]:
        running = [numbers_of(pid) for pid in self.workers()]
        for family in ProcessCollector(registry=None).collect():
            if family.name in ADDED:
                (own,) = family.samples
                value = own.value + sum(numbers.get(family.name, 0.0) for numbers in running)
                family.samples = [Sample(own.name, {}, value)]
            yield family


def cpu_series() -> Series:
    """The CPU seconds of a worker. The supervisor adds them to its own."""
    return Series("counter", CPU, f"{CPU}_total", (), ())


def numbers_of(pid: int) -> dict[str, float]:
    """Returns the values by metric; empty if the process has ended."""
    families = ProcessCollector(registry=None, pid=lambda: pid).collect()
    return {family.name: family.samples[0].value for family in families}
