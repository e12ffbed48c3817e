"""Servers, workloads and goals are declared; one runner measures them in turns and writes the tables."""

import asyncio
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.figure import Figure, bars
from benchmarks.load.orders import Ask, Order, Relay, Report, Unary, UnexpectedAnswer
from benchmarks.servers import Asks, Peer, Start, running_triton
from benchmarks.spread import Spread, cpu_s, percentile
from benchmarks.table import Table

NONE = "-"


@dataclass(frozen=True)
class Workload:
    """``ask``: the key in a server's requests. ``streams_s``: the duration of a stream; 0: unknown. None: no streams.

    ``keeps_awake``: idle processors do not halt during the measurement. ``times``: measurements in each round.
    """

    title: str
    ask: str
    connections: int = 1
    streams_s: float | None = None
    keeps_awake: bool = False
    times: int = 1
    unit: str = "request"

    def order(self, asks: Sequence[Ask], seconds: float) -> Order:
        if self.streams_s is None:
            return Unary(tuple(asks), seconds)
        return Relay(tuple(asks), seconds, self.streams_s)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sample:
    """``*_us``: microseconds of CPU for each request or event. ``p50_ms``, ``p99_ms``: of streams, the first event."""

    rate: float
    p50_ms: float
    p99_ms: float
    peer_us: float
    triton_us: float


Value = Callable[[Sample], float]
RATE: Value = operator.attrgetter("rate")
CPU: Value = operator.attrgetter("peer_us")
P50: Value = operator.attrgetter("p50_ms")


@dataclass
class Found:
    """The samples by workload and server, in the order of the rounds.

    ``idle_kib``: memory of an idle stream, by server. ``repeated``: rows about measurements that failed.
    """

    samples: dict[Workload, dict[str, list[Sample]]] = field(default_factory=lambda: defaultdict(dict))
    idle_kib: dict[str, list[float]] = field(default_factory=dict)
    repeated: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, workload: Workload, peer: str, sample: Sample) -> None:
        self.samples[workload].setdefault(peer, []).append(sample)

    def has(self, workload: Workload, *peers: str) -> bool:
        return all(peer in self.samples.get(workload, {}) for peer in peers)

    def spread(self, workload: Workload, peer: str, value: Value) -> Spread:
        return Spread([*map(value, self.samples[workload][peer])])


@dataclass(frozen=True)
class Goal:
    """A minimum and an aim for a figure of one server, or for its comparison with another within each round.

    None: there is no minimum, or no aim. ``case``: the row of the goal, whose title is then a column.
    """

    title: str
    floor: float | None
    aim: float | None
    figure: Callable[[Found], Spread | None]
    """Returns None if the run has no figures for it."""
    unit: str = "x"
    lower: bool = False
    case: str = ""

    def row(self, found: Spread) -> list[str]:
        """Returns the title, the figure, which is marked if the minimum is missed, the minimum and the aim."""
        bounds = ["" if each is None else f"{each:g} {self.unit}".replace(" x", "x") for each in (self.floor, self.aim)]
        is_reached = self.floor is None or (operator.le if self.lower else operator.ge)(found.median, self.floor)
        figure = f"{found.text(2)} {self.unit}".replace(" x", "x")
        return [self.title, figure if is_reached else f"{figure} **missed**", *bounds]


def ratio(
    workload: Workload,
    own: str,
    other: str,
    value: Value = RATE,
    *,
    compare: Callable[[float, float], float] = operator.truediv,
    base: Workload | None = None,
) -> Callable[[Found], Spread | None]:
    """Compares within each round, because other load in a round affects both. ``base``: the workload of ``other``."""

    def figure(found: Found) -> Spread | None:
        if not (found.has(workload, own) and found.has(base or workload, other)):
            return None
        first = found.spread(workload, own, value).values
        second = found.spread(base or workload, other, value).values
        return Spread([compare(a, b) for a, b in zip(first, second, strict=True)])

    return figure


def own(workload: Workload, peer: str, value: Value) -> Callable[[Found], Spread | None]:
    return lambda found: found.spread(workload, peer, value) if found.has(workload, peer) else None


@dataclass(frozen=True)
class Chart:
    """Bars for each server that has a figure. ``groups``: label -> workload."""

    title: str
    file: str
    groups: Mapping[str, Workload]
    value: Value

    def drawn(self, peers: Sequence[str], found: Found) -> Figure:
        spreads = {peer: [own(each, peer, self.value)(found) for each in self.groups.values()] for peer in peers}
        shown = {peer: each for peer, each in spreads.items() if any(each)}
        return bars(self.title, self.file, list(self.groups), shown)


@dataclass(frozen=True)
class Comparison:
    """``models``: writes Triton's repository into a folder; default the reference models and those of this package.

    ``has_triton``: else the servers get None instead of it. ``cpu_elsewhere``: servers whose CPU time is Triton's.
    """

    peers: Mapping[str, Start]
    workloads: Sequence[Workload]
    goals: Sequence[Goal]
    charts: Sequence[Chart] = ()
    note: str = ""
    seconds: float = 0.7
    warm_up_s: float = 0.15
    first_warm_up_s: float = 0.0
    models: Callable[[Path], Path] | None = None
    has_triton: bool = True
    cpu_elsewhere: tuple[str, ...] = ()

    async def run(self, rounds: int) -> list[Table | Figure]:
        found = Found()
        await self.measure(rounds, found)
        return self.results(found)

    async def measure(self, rounds: int, found: Found) -> None:
        """Runs every workload of every server once per round, in a random order."""
        async with self._servers() as (triton_pid, peers):
            cases = [(each, peer) for each in self.workloads for peer in peers if each.ask in peer.asks]
            if self.first_warm_up_s:
                for workload, peer in cases:
                    await _sample(peer, workload, triton_pid, self.first_warm_up_s, 0.0)
            for number in range(1, rounds + 1):
                say(f"round {number} of {rounds}")
                turns = [case for case in cases for _ in range(case[0].times)]
                for workload, peer in random.sample(turns, len(turns)):
                    found.add(workload, peer.name, await self._measured(workload, peer, triton_pid, found))

    async def _measured(self, workload: Workload, peer: Peer, triton_pid: int | None, found: Found) -> Sample:
        """Repeats a failed measurement once, because on a busy machine Triton may not answer for half a minute."""
        with processors_awake() if workload.keeps_awake else nullcontext():
            try:
                return await _sample(peer, workload, triton_pid, self.warm_up_s, self.seconds)
            except (UnexpectedAnswer, TimeoutError) as exc:
                error = f"{type(exc).__name__} {exc}"[:200].splitlines()[0]
                found.repeated.append((workload.title, peer.name, error))
                say(f"again: {found.repeated[-1]}")
                return await _sample(peer, workload, triton_pid, self.warm_up_s, self.seconds)

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[tuple[int | None, list[Peer]]]:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
            triton = None
            if self.has_triton:
                models = self.models(folder / "models") if self.models else None
                triton = stack.enter_context(running_triton(folder, models))
            peers = [await stack.enter_async_context(start(triton, folder)) for start in self.peers.values()]  # type: ignore[arg-type]
            yield triton.pid if triton else None, peers

    def results(self, found: Found) -> list[Table | Figure]:
        idle = [[peer, Spread(values).text(1)] for peer, values in found.idle_kib.items()]
        idle_note = "Resident memory that each open, silent stream adds to the process, including its call to Triton."
        errors = ["workload", "server", "error"]
        return [
            self.goals_table(found),
            *(chart.drawn(list(self.peers), found) for chart in self.charts),
            *(self.table(unit, found) for unit in dict.fromkeys(each.unit for each in self.workloads)),
            *([Table("Idle streams", ["server", "KiB a stream"], idle, idle_note)] if idle else []),
            *([Table("Repeated measurements", errors, found.repeated)] if found.repeated else []),
        ]

    def goals_table(self, found: Found) -> Table:
        values = [(goal, value) for goal in self.goals if (value := goal.figure(found)) is not None]
        note = f"{self.note} Ratios are computed within each round: median (10th to 90th percentile).".strip()
        titles = list(dict.fromkeys(goal.title for goal in self.goals if goal.case))
        if not titles:
            columns, rows = ["", "found", "required", "aim"], [goal.row(value) for goal, value in values]
        else:
            columns, cells = ["", *titles], {(goal.case, goal.title): goal.row(value)[1] for goal, value in values}
            cases = dict.fromkeys(case for case, _ in cells)
            rows = [[case, *(cells.get((case, title), "") for title in titles)] for case in cases]
        return Table("What this gateway reaches", columns, rows, note)

    def table(self, unit: str, found: Found) -> Table:
        """The rate has a spread; the other figures are medians, which keeps the table narrow."""
        workloads = [each for each in self.workloads if each.unit == unit]
        first = "" if workloads[0].streams_s is None else "first event "
        columns = ["", f"{unit}s/s", f"{first}p50, p99, ms", "CPU, µs: server, Triton"]
        rows: list[list[str]] = []
        for each in workloads:
            rows.append([f"**{each.title}**"])
            rows += [self._row(name, found.samples[each][name]) for name in self.peers if found.has(each, name)]
        return Table(f"{unit.capitalize()}s", columns, rows, f"CPU: for one {unit}.")

    def _row(self, peer: str, samples: list[Sample]) -> list[str]:
        def median(figure: str, digits: int = 0) -> str:
            return f"{statistics.median(getattr(sample, figure) for sample in samples):,.{digits}f}"

        cpu = NONE if peer in self.cpu_elsewhere else median("peer_us")
        return [
            peer,
            Spread([sample.rate for sample in samples]).text(),
            f"{median('p50_ms', 2)}, {median('p99_ms', 2)}",
            f"{cpu}, {median('triton_us')}" if self.has_triton else cpu,
        ]


async def _sample(peer: Peer, workload: Workload, triton_pid: int | None, warm_up_s: float, seconds: float) -> Sample:
    """Raises the exceptions of the load process. Divides the connections among the peer's loads."""
    share = workload.connections // len(peer.loads)
    async with AsyncExitStack() as stack:
        orders = []
        for _ in peer.loads:
            asks = await stack.enter_async_context(_opened(peer.asks, workload.ask, share))
            orders.append(asks)
        await _performed(peer, [workload.order(asks, warm_up_s) for asks in orders])
        groups = [[psutil.Process(pid) for pid in peer.pids], _family(triton_pid)]
        before = [sum(map(cpu_s, group)) for group in groups]
        reports = await _performed(peer, [workload.order(asks, seconds) for asks in orders])
        used_s = [sum(map(cpu_s, group)) - start for group, start in zip(groups, before, strict=True)]
    count = sum(each.count for each in reports)
    latencies_ms = [1000 * each for report in reports for each in report.durations]
    return Sample(
        sum(each.count / each.elapsed_s for each in reports),
        percentile(latencies_ms, 50),
        percentile(latencies_ms, 99),
        *(1e6 * each / count for each in used_s),
    )


async def _performed(peer: Peer, orders: Sequence[Order]) -> list[Report]:
    return await asyncio.gather(*(load.perform(order) for load, order in zip(peer.loads, orders, strict=True)))


@asynccontextmanager
async def _opened(asks: Asks, name: str, connections: int) -> AsyncIterator[Sequence[Ask]]:
    ask = asks[name]
    if callable(ask):
        async with ask(connections) as opened:
            yield opened
    else:
        yield [ask] * connections


def _family(pid: int | None) -> list[psutil.Process]:
    """Triton and its model processes."""
    return [] if pid is None else [process := psutil.Process(pid), *process.children(recursive=True)]


def say(text: str) -> None:
    """Shows the progress on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


_SPIN = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
"""Runs only while nothing else wants to run on the processor."""


@contextmanager
def processors_awake() -> Iterator[None]:
    """Runs a process on each processor. Waking a processor of a virtual machine takes longer than relaying an event."""
    command = [sys.executable, "-S", "-c", _SPIN]
    processes = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
