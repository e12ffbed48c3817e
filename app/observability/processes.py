"""The ``process_*`` metrics: CPU time, memory and open files of the gateway, including its workers."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

CPU = "process_cpu_seconds"
ADDED = {"process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds"}


class ProcessMetrics(Collector):
    """``process_max_fds`` and ``process_start_time_seconds`` are those of this process; the others are sums.

    The CPU time of a worker that has ended stays in the sum, so that the counter never decreases.
    """

    def __init__(self) -> None:
        self.workers: Callable[[], Iterable[int]] = tuple
        """Returns the process ids of the running workers."""
        self._cpu_s: dict[int, float] = {}

    def collect(self) -> Iterator[Metric]:
        running = {pid: numbers_of(pid) for pid in self.workers()}
        self._cpu_s |= {pid: numbers[CPU] for pid, numbers in running.items() if CPU in numbers}
        for family in ProcessCollector(registry=None).collect():
            (own,) = family.samples
            value = own.value
            if family.name == CPU:
                value += sum(self._cpu_s.values())
            elif family.name in ADDED:
                value += sum(numbers.get(family.name, 0.0) for numbers in running.values())
            family.samples = [Sample(own.name, {}, value)]
            yield family


def numbers_of(pid: int) -> dict[str, float]:
    """Returns the values by metric; empty if the process has ended."""
    families = ProcessCollector(registry=None, pid=lambda: pid).collect()
    return {family.name: family.samples[0].value for family in families}
