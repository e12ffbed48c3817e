"""Several measurements of one figure: their median and their spread."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Spread:
    """Values of one figure, one for each round."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return percentile(self.values, 10)

    @property
    def high(self) -> float:
        return percentile(self.values, 90)

    def text(self, digits: int = 0) -> str:
        """Formats the median, and the 10th to the 90th percentile."""
        to = "-" if self.low >= 0 else " to "
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}{to}{self.high:,.{digits}f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile by nearest rank."""
    return sorted(values)[round(percent / 100 * (len(values) - 1))]


def cpu_s(process: psutil.Process) -> float:
    """Returns the CPU time of the process so far in seconds, including all threads."""
    times = process.cpu_times()
    return float(times.user + times.system)
