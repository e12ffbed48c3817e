"""`python -m benchmarks coalescing`: small requests that share calls, and other servers in front of the same Triton."""

import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.load.orders import HttpAsk, Unary
from benchmarks.peers import plain_fastapi, triton_http
from benchmarks.peers.contents import SMALL, json_of
from benchmarks.peers.found import Spread
from benchmarks.peers.peer import Peer, Start, serving
from benchmarks.stage import HERE, Triton, running_triton
from benchmarks.table import Table
from benchmarks.timing import cpu_s, percentile

CONNECTIONS = (1, 32, 256)
MORE_OF_ONE_CONNECTION = 3
"""Further measurements of one connection in each round, because a goal of 3 % needs more of them."""
WARM_UP_S = 1.5
SECONDS = 2.0
MODEL = """
name: "small"
backend: "python"
max_batch_size: 64
input [ { name: "INPUT", data_type: TYPE_FP32, dims: [ 4 ] } ]
output [ { name: "OUTPUT", data_type: TYPE_FP32, dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU, count: 1 } ]
"""
PIPELINE = """
pipelines:
  small:
    model: small
    idempotent: true
    coalesce: {coalesce}
    sample: {{INPUT: [1, 2, 3, 4]}}
  beside:
    model: small
    idempotent: true
    sample: {{INPUT: [1, 2, 3, 4]}}
"""
EACH, SHARED = "a call each", "shared calls"
BESIDE = f"{EACH}, same process"
"""A pipeline beside the one with shared calls. The p50 of two processes differs by more than that of two pipelines."""
EACH_2, SHARED_2 = f"{EACH}, 2 workers", f"{SHARED}, 2 workers"
GATEWAYS = {EACH: (1, False), SHARED: (1, True), EACH_2: (2, False), SHARED_2: (2, True)}
"""The workers, and whether requests share calls."""
ASK = HttpAsk("/v1/pipelines/small", json_of(INPUT=SMALL))
TENSOR = {"name": "INPUT", "datatype": "FP32", "shape": [1, len(SMALL)], "data": SMALL}
ASKS = {
    **dict.fromkeys(GATEWAYS, ASK),
    BESIDE: HttpAsk("/v1/pipelines/beside", json_of(INPUT=SMALL)),
    plain_fastapi.NAME: HttpAsk("/small", json_of(input=SMALL)),
    triton_http.NAME: HttpAsk("/v2/models/small/infer", json_of(inputs=[TENSOR])),
}
NOTE = (
    "A Python model with `max_batch_size: 64`, four numbers in a request; load, servers and Triton on the same cores. "
    "CPU: microseconds of Triton and its models, and of the server's processes, for one request."
)

Key = tuple[str, int]
"""The server and the connections."""


@dataclass(frozen=True)
class Sample:
    rate: float
    median_ms: float
    triton_us: float
    server_us: float


Samples = Mapping[Key, list[Sample]]


@dataclass(frozen=True)
class Goal:
    """The rate of ``server`` as a multiple of that of ``base``: it must be ``least``, or should be ``aim``.

    With ``most``: the p50, which may be at most that multiple.
    """

    connections: int
    server: str
    base: str
    least: float = 0.0
    most: float = 0.0
    aim: float = 0.0

    def row(self, samples: Samples) -> list[str]:
        figure = "median_ms" if self.most else "rate"
        pairs = zip(samples[self.server, self.connections], samples[self.base, self.connections], strict=True)
        found = Spread(tuple(getattr(one, figure) / getattr(other, figure) for one, other in pairs))
        compared = [str(self.connections), "p50" if self.most else "requests/s", self.server, self.base]
        if self.aim:
            return [*compared, f"{found.text(2)}x", f"aim {self.aim:g}", ""]
        is_reached = found.median <= self.most if self.most else found.median >= self.least
        goal = f"at most {self.most:g}" if self.most else f"at least {self.least:g}"
        return [*compared, f"{found.text(2)}x", goal, "reached" if is_reached else "**missed**"]


GOALS = (
    Goal(1, SHARED, BESIDE, most=1.03),
    Goal(32, SHARED, EACH, least=1.25),
    Goal(256, SHARED, EACH, least=1.3),
    Goal(256, SHARED_2, EACH_2, least=1.8),
    Goal(32, SHARED, plain_fastapi.NAME, aim=1.0),
    Goal(256, SHARED, plain_fastapi.NAME, aim=1.0),
    Goal(32, SHARED, triton_http.NAME, aim=1.0),
    Goal(256, SHARED, triton_http.NAME, aim=1.0),
    Goal(256, SHARED_2, triton_http.NAME, aim=1.0),
)


async def run(rounds: int) -> list[Table]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        triton = await stack.enter_async_context(running_triton(folder, _repository(folder / "models")))
        peers = {name: await stack.enter_async_context(start(triton, folder)) for name, start in _servers().items()}
        for name, peer in peers.items():
            for connections in CONNECTIONS:  # admission learns the model's rate
                await peer.load.perform(Unary(ASKS[name], connections, WARM_UP_S))
        peers[BESIDE] = peers[SHARED]
        compared = [(SHARED, 1), (BESIDE, 1)]
        keys = [(name, connections) for name in peers for connections in CONNECTIONS if name != BESIDE]
        keys += [(BESIDE, 1), *compared * MORE_OF_ONE_CONNECTION]
        samples: dict[Key, list[Sample]] = {key: [] for key in keys}
        for _ in range(rounds):
            for name, connections in random.sample(keys, len(keys)):
                samples[name, connections].append(await _measured(peers[name], ASKS[name], connections, triton))
    return [_goals(samples), _figures(samples)]


def _repository(folder: Path) -> Path:
    model = folder / "small"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(MODEL)
    (model / "1" / "model.py").symlink_to(HERE / "models" / "bench_identity" / "1" / "model.py")
    return folder


def _servers() -> Mapping[str, Start]:
    gateways = {name: partial(_gateway, name) for name in GATEWAYS}
    return {**gateways, plain_fastapi.NAME: plain_fastapi.start, triton_http.NAME: triton_http.start}


def _gateway(name: str, triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    workers, shares = GATEWAYS[name]
    config = folder / f"{name}.yaml"
    config.write_text(PIPELINE.format(coalesce=str(shares).lower()))

    def command(port: int) -> list[str]:
        serve = [sys.executable, "-m", "app.cli", "serve", f"--port={port}", "--admin-port=0", f"--workers={workers}"]
        return [*serve, f"--config={config}", f"--triton-url={triton.grpc_url}", "--log-level=warning"]

    return serving(name, command, "/health/ready", {"small": ASK}, folder)


async def _measured(peer: Peer, ask: HttpAsk, connections: int, triton: Triton) -> Sample:
    models, servers = _processes(triton.pid), [] if peer.pid == triton.pid else _processes(peer.pid)
    before = sum(map(cpu_s, servers)), sum(map(cpu_s, models))
    report = await peer.load.perform(Unary(ask, connections, SECONDS))
    server_s, triton_s = sum(map(cpu_s, servers)) - before[0], sum(map(cpu_s, models)) - before[1]
    return Sample(
        rate=report.count / report.elapsed_s,
        median_ms=1e3 * percentile(report.durations, 50),
        triton_us=1e6 * triton_s / report.count,
        server_us=1e6 * server_s / report.count,
    )


def _processes(pid: int) -> list[psutil.Process]:
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def _goals(samples: Samples) -> Table:
    columns = ["connections", "", "server", "compared with", "ratio", "goal", ""]
    note = "Ratios are computed within each round."
    return Table("Goals", columns, [goal.row(samples) for goal in GOALS], note)


def _figures(samples: Samples) -> Table:
    columns = ["connections", "server", "requests/s", "p50 ms", "Triton CPU µs", "server CPU µs"]
    keys = [(name, connections) for connections in CONNECTIONS for name in ASKS if (name, connections) in samples]
    rows = [[str(connections), name, *_cells(samples[name, connections])] for name, connections in keys]
    return Table("Figures", columns, rows, NOTE)


def _cells(samples: list[Sample]) -> list[str]:
    digits = {"rate": 0, "median_ms": 2, "triton_us": 0, "server_us": 0}
    return [Spread(tuple(getattr(each, name) for each in samples)).text(count) for name, count in digits.items()]
