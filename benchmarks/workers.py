"""`python -m benchmarks workers`: one worker and several, over an engine that answers at once."""

import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
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

WORKERS = (1, 2)
CONNECTIONS = 64
WARM_UP_S = 0.3
SECONDS = 1.0
FLOOR = 0.9
ASK = HttpAsk("/v1/pipelines/identity", json_of(INPUT=SMALL))
CONFIG = "pipelines: {identity: {model: identity}}\n"
NOTE = (
    "`serve` with sockets, log and metrics, over an engine that answers at once in place of Triton. Cores in use: "
    "CPU seconds of the gateway's processes, supervisor included, for each second. The load process has the rest."
)


@dataclass(frozen=True)
class Sample:
    rate: float
    cores: float

    @property
    def request_us(self) -> float:
        """CPU of the gateway's processes for one request."""
        return 1e6 * self.cores / self.rate


async def run(rounds: int) -> list[Table]:
    samples: dict[int, list[Sample]] = {workers: [] for workers in WORKERS}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        peers = {workers: await stack.enter_async_context(_gateway(workers, folder)) for workers in WORKERS}
        for peer in peers.values():
            await peer.load.perform(Unary(ASK, CONNECTIONS, WARM_UP_S))
        for _ in range(rounds):
            for workers in random.sample(WORKERS, len(WORKERS)):
                samples[workers].append(await _measured(peers[workers]))
    return [_rates(samples), _scaling(samples)]


def _gateway(workers: int, folder: Path) -> AbstractAsyncContextManager[Peer]:
    config = folder / "identity.yaml"
    config.write_text(CONFIG)

    def command(port: int) -> list[str]:
        serve = [sys.executable, "-m", "benchmarks.instant", "serve", f"--port={port}", "--admin-port=0"]
        return [*serve, f"--workers={workers}", f"--config={config}"]

    return serving(f"{workers} workers", command, "/health/ready", {"small": ASK}, folder)


async def _measured(peer: Peer) -> Sample:
    server = psutil.Process(peer.pid)
    processes = [server, *server.children()]
    before = sum(map(cpu_s, processes))
    report = await peer.load.perform(Unary(ASK, CONNECTIONS, SECONDS))
    used_s = sum(map(cpu_s, processes)) - before
    return Sample(report.count / report.elapsed_s, used_s / report.elapsed_s)


def _rates(samples: Mapping[int, Sequence[Sample]]) -> Table:
    columns = ["workers", "requests/s", "cores in use", "CPU µs a request"]
    rows = [[str(workers), *_cells(each)] for workers, each in samples.items()]
    return Table(f"Small JSON, {CONNECTIONS} connections", columns, rows, NOTE)


def _cells(samples: Sequence[Sample]) -> list[str]:
    figures = {"rate": 0, "cores": 2, "request_us": 0}
    return [
        Spread(tuple(getattr(sample, figure) for sample in samples)).text(digits) for figure, digits in figures.items()
    ]


def _scaling(samples: Mapping[int, Sequence[Sample]]) -> Table:
    """Each round by itself."""
    columns = ["workers", "requests/s", "requests for each CPU second", "at least", ""]
    rows = [_compared(workers, samples[workers], samples[1]) for workers in WORKERS[1:]]
    note = "Where N cores are free for N workers, the rate is N times the second ratio: they share only the port."
    return Table("Against 1 worker", columns, rows, note)


def _compared(workers: int, several: Sequence[Sample], one: Sequence[Sample]) -> list[str]:
    pairs = list(zip(several, one, strict=True))
    rate = Spread(tuple(many.rate / single.rate for many, single in pairs))
    per_second = Spread(tuple(single.request_us / many.request_us for many, single in pairs))
    verdict = "reached" if per_second.median >= FLOOR else "**missed**"
    return [str(workers), f"{rate.text(2)}x", f"{per_second.text(2)}x", f"{FLOOR}x", verdict]
