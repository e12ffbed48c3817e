"""`python -m benchmarks coalescing`: small requests that share calls, and that have a call each, with a real Triton."""

import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.load.orders import HttpAsk, Unary
from benchmarks.peers.found import Spread
from benchmarks.peers.peer import Peer, serving
from benchmarks.stage import HERE, Triton, running_triton
from benchmarks.table import Table
from benchmarks.timing import cpu_s, percentile

CONNECTIONS = (1, 32, 256)
WARM_UP_S = 1.5
SECONDS = 2.0
MODEL = """
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
"""
ASK = HttpAsk("/v1/pipelines/small", b'{"INPUT": [0.5, 1.5, 2.5, 3.5]}')
EACH, SHARED = "a call each", "shared calls"
NOTE = (
    "A Python model with `max_batch_size: 64`, four numbers in a request; load, gateway and Triton on the same cores. "
    "CPU: microseconds of Triton's processes and of the gateway's for one request."
)

Key = tuple[int, str, int]
"""Workers, form and connections."""


@dataclass(frozen=True)
class Sample:
    rate: float
    median_ms: float
    triton_us: float
    gateway_us: float


async def run(rounds: int) -> list[Table]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        triton = await stack.enter_async_context(running_triton(folder, _repository(folder / "models")))
        peers = {
            (workers, form): await stack.enter_async_context(_gateway(workers, form, triton, folder))
            for workers in (1, 2)
            for form in (EACH, SHARED)
        }
        for peer in peers.values():
            for connections in CONNECTIONS:  # admission learns the model's rate
                await peer.load.perform(Unary(ASK, connections, WARM_UP_S))
        keys: list[Key] = [(*which, connections) for which in peers for connections in CONNECTIONS]
        samples: dict[Key, list[Sample]] = {key: [] for key in keys}
        for _ in range(rounds):
            for key in random.sample(keys, len(keys)):
                samples[key].append(await _measured(peers[key[:2]], key[2], triton))
    return [_table(samples, workers) for workers in (1, 2)]


def _repository(folder: Path) -> Path:
    model = folder / "small"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(f'name: "small"\n{MODEL}')
    (model / "1" / "model.py").symlink_to(HERE / "models" / "bench_identity" / "1" / "model.py")
    return folder


def _gateway(workers: int, form: str, triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    config = folder / f"{form.replace(' ', '-')}.yaml"
    config.write_text(PIPELINE.format(coalesce=str(form == SHARED).lower()))

    def command(port: int) -> list[str]:
        serve = [sys.executable, "-m", "app.cli", "serve", f"--port={port}", "--admin-port=0", f"--workers={workers}"]
        return [*serve, f"--config={config}", f"--triton-url={triton.grpc_url}", "--log-level=warning"]

    return serving(f"{form} {workers}", command, "/health/ready", {"small": ASK}, folder)


async def _measured(peer: Peer, connections: int, triton: Triton) -> Sample:
    servers, models = _processes(peer.pid), _processes(triton.pid)
    before = sum(map(cpu_s, servers)), sum(map(cpu_s, models))
    report = await peer.load.perform(Unary(ASK, connections, SECONDS))
    gateway_s, triton_s = sum(map(cpu_s, servers)) - before[0], sum(map(cpu_s, models)) - before[1]
    return Sample(
        rate=report.count / report.elapsed_s,
        median_ms=1e3 * percentile(report.durations, 50),
        triton_us=1e6 * triton_s / report.count,
        gateway_us=1e6 * gateway_s / report.count,
    )


def _processes(pid: int) -> list[psutil.Process]:
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def _table(samples: Mapping[Key, list[Sample]], workers: int) -> Table:
    columns = ["connections", "", "requests/s", "against a call each", "p50 ms", "Triton CPU µs", "gateway CPU µs"]
    rows = []
    for connections in CONNECTIONS:
        for form in (EACH, SHARED):
            found, base = samples[workers, form, connections], samples[workers, EACH, connections]
            ratios = [one.rate / other.rate for one, other in zip(found, base, strict=True)]
            rows.append(
                [
                    str(connections),
                    form,
                    Spread(tuple(each.rate for each in found)).text(),
                    "" if form == EACH else f"{Spread(tuple(ratios)).text(2)}x",
                    *(
                        Spread(tuple(getattr(each, name) for each in found)).text(digits)
                        for name, digits in (("median_ms", 2), ("triton_us", 0), ("gateway_us", 0))
                    ),
                ]
            )
    return Table("One process" if workers == 1 else f"{workers} workers", columns, rows, NOTE)
