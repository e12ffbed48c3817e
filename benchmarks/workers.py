"""`python -m benchmarks workers`: one worker, two workers, and two gateways, with an engine that answers at once."""

import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.load.orders import HttpAsk, Unary
from benchmarks.peers.contents import SMALL, json_of
from benchmarks.peers.found import Spread
from benchmarks.peers.peer import Peer, serving
from benchmarks.table import Table
from benchmarks.timing import cpu_s

CONNECTIONS = 64
WARM_UP_S = 0.3
SECONDS = 1.0
FLOOR = 0.9
ASK = HttpAsk("/v1/pipelines/identity", json_of(INPUT=SMALL))
CONFIG = "pipelines: {identity: {model: identity}}\n"

ONE, TWO, SIDE_BY_SIDE = "1 worker", "2 workers", "two separate gateways with 1 worker"
NOTE = (
    "`serve` with sockets, log and metrics, with an engine that answers at once instead of Triton. Cores in use: "
    "CPU seconds per second of the gateway's processes, including their parent. The load uses the rest."
)
SCALING = (
    "Two gateways share nothing, so on two cores their rate is the upper limit for two workers; other load on the "
    "machine affects both equally. With N free cores, N workers reach N times the rate of one, times the last ratio."
)


@dataclass(frozen=True)
class Sample:
    rate: float
    cores: float

    @property
    def request_us(self) -> float:
        """CPU time of the gateway's processes for one request."""
        return 1e6 * self.cores / self.rate


Samples = Mapping[str, list[Sample]]


async def run(rounds: int) -> list[Table]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        starts = (gateway_with(1, "one", folder), gateway_with(1, "other", folder), gateway_with(2, "two", folder))
        one, other, two = [await stack.enter_async_context(start) for start in starts]
        cases = {ONE: (one,), TWO: (two,), SIDE_BY_SIDE: (one, other)}
        samples: Samples = {name: [] for name in cases}
        for peer in (one, other, two):
            await peer.load.perform(Unary(ASK, CONNECTIONS, WARM_UP_S))
        for _ in range(rounds):
            for name in random.sample(list(cases), len(cases)):
                samples[name].append(await _measured(cases[name]))
    return [_rates(samples), _scaling(samples)]


def gateway_with(workers: int, name: str, folder: Path) -> AbstractAsyncContextManager[Peer]:
    """Starts a gateway whose engine answers at once. ``name``: of its log in ``folder``."""
    config = folder / "identity.yaml"
    config.write_text(CONFIG)

    def command(port: int) -> list[str]:
        serve = [sys.executable, "-m", "benchmarks.instant", "serve", f"--port={port}", "--admin-port=0"]
        return [*serve, f"--workers={workers}", f"--config={config}"]

    return serving(name, command, "/health/ready", {"small": ASK}, folder)


async def _measured(peers: Sequence[Peer]) -> Sample:
    """Divides the connections among the peers."""
    servers = [psutil.Process(peer.pid) for peer in peers]
    processes = [each for server in servers for each in (server, *server.children())]
    order = Unary(ASK, CONNECTIONS // len(peers), SECONDS)
    before = sum(map(cpu_s, processes))
    reports = await asyncio.gather(*(peer.load.perform(order) for peer in peers))
    used_s = sum(map(cpu_s, processes)) - before
    return Sample(
        sum(each.count / each.elapsed_s for each in reports), used_s / max(each.elapsed_s for each in reports)
    )


def _rates(samples: Samples) -> Table:
    columns = ["", "requests/s", "cores in use", "CPU µs a request"]
    rows = [[name, *_cells(each)] for name, each in samples.items()]
    return Table(f"Small JSON, {CONNECTIONS} connections", columns, rows, NOTE)


def _cells(samples: Sequence[Sample]) -> list[str]:
    figures = {"rate": 0, "cores": 2, "request_us": 0}
    return [
        Spread(tuple(getattr(sample, figure) for sample in samples)).text(digits) for figure, digits in figures.items()
    ]


def _scaling(samples: Samples) -> Table:
    """Computes the ratios of each round separately."""
    columns = ["2 workers, against", "requests/s", "requests for each CPU second", "at least", ""]
    alone = _compared(samples[TWO], samples[ONE])
    beside = _compared(samples[TWO], samples[SIDE_BY_SIDE])
    verdict = "reached" if beside[0].median >= FLOOR else "**missed**"
    rows = [
        [ONE, *(f"{each.text(2)}x" for each in alone), "", ""],
        [SIDE_BY_SIDE, *(f"{each.text(2)}x" for each in beside), f"{FLOOR}x of the requests/s", verdict],
    ]
    return Table("Scaling", columns, rows, SCALING)


def _compared(some: Sequence[Sample], others: Sequence[Sample]) -> tuple[Spread, Spread]:
    def ratios(figure: Callable[[Sample], float]) -> Spread:
        return Spread(tuple(figure(one) / figure(other) for one, other in zip(some, others, strict=True)))

    return ratios(lambda sample: sample.rate), ratios(lambda sample: 1 / sample.request_us)
