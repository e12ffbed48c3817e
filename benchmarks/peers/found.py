"""The results of a run: the samples of every peer and workload, in the order of the rounds."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.peers.measuring import Sample
from benchmarks.peers.workloads import Workload
from benchmarks.timing import percentile

Figure = Callable[[Sample], float]


@dataclass(frozen=True)
class Spread:
    """Values of one figure, one for each round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The 10th percentile."""
        return percentile(self.values, 10)

    @property
    def high(self) -> float:
        """The 90th percentile."""
        return percentile(self.values, 90)

    def text(self, digits: int = 0) -> str:
        to = "-" if self.low >= 0 else " to "
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}{to}{self.high:,.{digits}f})"


@dataclass
class Found:
    """The results. ``samples``: by workload and peer. ``idle_kib``: memory of an idle stream, by peer.

    ``repeated``: the workload, the peer and the error of each repeated measurement.
    """

    samples: dict[Workload, dict[str, list[Sample]]] = field(default_factory=lambda: defaultdict(dict))
    idle_kib: dict[str, list[float]] = field(default_factory=dict)
    repeated: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, workload: Workload, peer: str, sample: Sample) -> None:
        self.samples[workload].setdefault(peer, []).append(sample)

    def has(self, workload: Workload, *peers: str) -> bool:
        return all(peer in self.samples.get(workload, {}) for peer in peers)

    def spread(self, workload: Workload, peer: str, figure: Figure) -> Spread:
        return Spread(tuple(map(figure, self.samples[workload][peer])))

    def compared(
        self, workload: Workload, peers: tuple[str, str], figure: Figure, compare: Callable[[float, float], float]
    ) -> Spread:
        """Compares two peers within each round, because other load in a round affects both."""
        first, second = (self.samples[workload][peer] for peer in peers)
        return Spread(tuple(compare(figure(a), figure(b)) for a, b in zip(first, second, strict=True)))
