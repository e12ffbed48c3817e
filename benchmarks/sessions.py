"""`python -m benchmarks sessions`: steps of sessions over HTTP and WebSockets, compared with a bare gRPC client."""

import random
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import psutil
from tritonclient.grpc import InferInput

from benchmarks.load.orders import Ask, Each, GrpcAsk, HttpAsk, SocketAsk, TensorAsk
from benchmarks.load.process import LoadProcess, load_process
from benchmarks.peers.contents import SMALL, json_of
from benchmarks.peers.found import Spread
from benchmarks.stage import Gateway, Stage, Triton, stage
from benchmarks.table import Table
from benchmarks.timing import Durations, cpu_s

SESSIONS = (1, 32)
WARM_UP_S, SECONDS = 0.3, 1.0
FLOOR = 0.7
MODEL, ORDINARY_MODEL = "bench_session", "bench_identity"
BODY = json_of(input=SMALL)
GRPC, HTTP, SOCKET = "bare grpc.aio client", "this gateway, HTTP", "this gateway, WebSocket"
ORDINARY = "for comparison: this gateway, a request to a model without a state"
NOTE = (
    "Steps of 4 floats to a model with a state that computes nothing. A session sends its next step when the last one "
    "was answered. The bare client is Triton's stub on grpc.aio with prepared requests of sequences. The load "
    "of the gateway writes prepared bytes to its sockets and searches the answers only for their length or their last "
    "event. Each load is a process of its own. CPU: for one step; Triton's includes the model's process, and falls "
    "with the number of steps that one execution of the model has."
)


@dataclass(frozen=True)
class Sample:
    rate: float
    p50_ms: float
    p99_ms: float
    batch: float
    """Steps for each execution of the model."""
    gateway_us: float
    triton_us: float
    load_us: float


@dataclass(frozen=True)
class Way:
    """How steps are sent. ``opened``: opens a number of sessions, and ends them after the block."""

    load: LoadProcess
    opened: Callable[[int], AbstractAsyncContextManager[tuple[Ask, ...]]]
    model: str = MODEL


async def run(rounds: int) -> list[Table]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        on = await stack.enter_async_context(stage())
        grpc = await stack.enter_async_context(load_process("grpc", on.triton.grpc_url, folder))
        http = await stack.enter_async_context(load_process("http", on.gateway.url.removeprefix("http://"), folder))
        ways = {
            GRPC: Way(grpc, lambda sessions: _sequences(on.triton, sessions)),
            HTTP: Way(http, lambda sessions: _sessions(on.gateway, sessions)),
            SOCKET: Way(http, _sockets),
            ORDINARY: Way(http, _requests, ORDINARY_MODEL),
        }
        return [await _compared(on, ways, sessions, rounds) for sessions in SESSIONS]


async def _compared(on: Stage, ways: Mapping[str, Way], sessions: int, rounds: int) -> Table:
    """Measures each way once per round, in a random order."""
    found: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            found[name].append(await _measured(on, ways[name], sessions))
    return _table(sessions, found)


async def _measured(on: Stage, way: Way, sessions: int) -> Sample:
    triton = psutil.Process(on.triton.pid)
    groups = [
        [psutil.Process(on.gateway.pid)],
        [triton, *triton.children(recursive=True)],
        [psutil.Process(way.load.pid)],
    ]
    async with way.opened(sessions) as asks:
        await way.load.perform(Each(asks, WARM_UP_S))
    async with way.opened(sessions) as asks:
        [executed] = await on.triton.executions(way.model)
        before = [sum(map(cpu_s, group)) for group in groups]
        report = await way.load.perform(Each(asks, SECONDS))
        used = [
            1e6 * (sum(map(cpu_s, group)) - start) / report.count for group, start in zip(groups, before, strict=True)
        ]
        [executions] = await on.triton.executions(way.model)
    latencies = Durations(report.durations)
    return Sample(
        report.count / report.elapsed_s,
        latencies.percentile_ms(50),
        latencies.percentile_ms(99),
        report.count / (executions - executed),
        *used,
    )


@asynccontextmanager
async def _sessions(gateway: Gateway, sessions: int) -> AsyncIterator[tuple[Ask, ...]]:
    answers = [await gateway.client.post(f"/v1/pipelines/{MODEL}/sessions") for _ in range(sessions)]
    urls = [str(each.raise_for_status().json()["url"]) for each in answers]
    yield tuple([HttpAsk(url, BODY) for url in urls])
    for url in urls:
        (await gateway.client.delete(url)).raise_for_status()


@asynccontextmanager
async def _sockets(sessions: int) -> AsyncIterator[tuple[Ask, ...]]:
    """The session of a WebSocket begins and ends with it."""
    yield (SocketAsk(f"/v1/pipelines/{MODEL}/session", BODY, b'"event":"done"'),) * sessions


@asynccontextmanager
async def _requests(connections: int) -> AsyncIterator[tuple[Ask, ...]]:
    yield (HttpAsk(f"/v1/pipelines/{ORDINARY_MODEL}", BODY),) * connections


_sequence_ids = count(1)


@asynccontextmanager
async def _sequences(triton: Triton, sessions: int) -> AsyncIterator[tuple[Ask, ...]]:
    tensor = InferInput("INPUT", [1, 4], "FP32")
    tensor.set_data_from_numpy(SMALL.reshape(1, 4))
    ids = [next(_sequence_ids) for _ in range(sessions)]
    for each in ids:
        await triton.client.infer(MODEL, [tensor], sequence_id=each, sequence_start=True)
    inputs = (TensorAsk("INPUT", "FP32", (1, 4), SMALL.astype(np.float32).tobytes()),)
    yield tuple([GrpcAsk(MODEL, inputs, sequence_id=each) for each in ids])
    for each in ids:
        await triton.client.infer(MODEL, [tensor], sequence_id=each, sequence_end=True)


def _table(sessions: int, found: Mapping[str, Sequence[Sample]]) -> Table:
    columns = [
        "",
        "steps/s",
        f"steps/s, against the {GRPC}",
        "p50, ms",
        "p99, ms",
        "steps of an execution",
        "CPU µs, gateway",
        "CPU µs, Triton",
        "CPU µs, load",
    ]
    rows = [_row(name, samples, found[GRPC]) for name, samples in found.items()]
    note = f"{NOTE} At least {FLOOR}x of the steps/s is required." if sessions == SESSIONS[0] else ""
    return Table(f"{sessions} session{'s' * (sessions > 1)} at a time", columns, rows, note)


def _row(name: str, samples: Sequence[Sample], bare: Sequence[Sample]) -> Sequence[str]:
    """The ratio is that of each round."""
    ratio = Spread(tuple([one.rate / other.rate for one, other in zip(samples, bare, strict=True)]))

    def text(figure: str, digits: int = 0) -> str:
        return Spread(tuple([getattr(each, figure) for each in samples])).text(digits)

    return [
        name,
        text("rate"),
        "" if name == GRPC else f"{ratio.text(2)}x",
        text("p50_ms", 2),
        text("p99_ms", 2),
        text("batch", 1),
        "-" if name == GRPC else text("gateway_us"),
        text("triton_us"),
        text("load_us"),
    ]
