"""`python -m benchmarks kinds`: large responses, large inputs and many tiny requests, compared with direct calls.

The models are stand-ins of the test suite (``tests/zoo``) with fixed sizes. A stand-in computes each output from its
inputs, which takes several milliseconds for 3 MB. All peers send the same inputs, so this time is part of each figure,
and the ratios are nearer to 1 than with a model that computes nothing.
"""

import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.load.orders import Ask, Flood, GrpcAsk, HttpAsk, TensorAsk, UnexpectedAnswer
from benchmarks.load.process import load_process
from benchmarks.peers import gateway, grpc_client, triton_http
from benchmarks.peers.contents import json_of
from benchmarks.peers.found import Found, Spread
from benchmarks.peers.measuring import Sample, measure
from benchmarks.peers.peer import Asks, Peer
from benchmarks.peers.tables import NONE
from benchmarks.peers.workloads import Workload
from benchmarks.stage import running_triton
from benchmarks.table import Table
from benchmarks.timing import cpu_s, percentile
from tests.zoo.cases import Case, random_case
from tests.zoo.dialects import oip_request
from tests.zoo.expected import body_of
from tests.zoo.kinds import BY_NAME
from tests.zoo.repository import write_gateway_yaml, write_models

SECONDS = 0.3
PACED_S = 1.5
WARM_UP_S = 0.2
RATE = 1000
TICK_S = 0.001
DRAIN_S = 5.0
"""Requests are answered before their connections are closed: Triton 2.51 may crash when many are cancelled."""
RESPONSES = 10
"""Of a stream."""
LAST_CHUNK = b"\r\n0\r\n\r\n"
KINDS = {
    "speech": replace(BY_NAME["speech"], outputs={"AUDIO": "FP32[25000..25000]"}, responses=(RESPONSES, RESPONSES)),
    "painter": replace(BY_NAME["painter"], outputs={"IMAGE": "UINT8[1024..1024,1024..1024,3]"}),
    "video": BY_NAME["video"],
    "yolo": BY_NAME["yolo"],
    "trees": replace(BY_NAME["trees"], inputs={"ROWS": "FP32[1..1,8]"}, outputs={"MARGIN": "FP32[1..1,1]"}),
}
WORKLOADS = (
    Workload("stream of 10 responses of 100 KB, `/v1`", "speech", is_stream=True),
    Workload("stream of 10 responses of 100 KB, `generate_stream`", "speech v2", is_stream=True),
    Workload("output of 3.1 MB (1024 by 1024 pixels), `/v2` binary", "painter"),
    Workload("output of 3.1 MB (1024 by 1024 pixels), `/v1` JSON", "painter json"),
    Workload("input of 5.5 MB (2 frames of 720p), `/v2` binary", "video"),
    Workload("output [84,8400] of YOLO (2.8 MB), `/v2` binary", "yolo"),
    Workload("output [84,8400] of YOLO (2.8 MB), `/v2` JSON", "yolo json"),
)
"""Requests of YOLO also have an input of 4.9 MB, as a binary tensor."""
PACED = {
    f"{gateway.NAME}, `/v1`": (gateway.NAME, "trees"),
    f"{gateway.NAME}, `/v2` JSON": (gateway.NAME, "trees v2"),
    f"{triton_http.NAME}, JSON": (triton_http.NAME, "trees v2"),
    grpc_client.NAME: (grpc_client.NAME, "trees"),
}
"""Row of the second table -> a peer and its request."""
NOTE = (
    "One connection, one request at a time. A figure is the p50 of a round in ms; of a stream, the mean until its end. "
    "Triton's HTTP endpoint gets a `/v2` JSON request in the row of `/v1` JSON, and `generate_stream` in both rows of "
    "streams. Ratios are computed within each round. CPU: ms of the gateway for one request or stream."
)
PACED_NOTE = (
    f"One row of 8 numbers; {RATE:,} requests a second for {PACED_S:g} s, sent on time whether or not earlier ones are "
    "answered. CPU: ms of the gateway for one request."
)


@dataclass(frozen=True)
class Paced:
    """One measurement of the tiny requests."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


async def run(rounds: int) -> list[Table]:
    found, paced = Found(), {name: list[Paced]() for name in PACED}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as path:
        async with running_peers(Path(path)) as peers:
            for _ in range(rounds):
                await _measure_round(peers, found)
                for name in random.sample(list(PACED), len(PACED)):
                    peer, ask = PACED[name]
                    paced[name].append(await _paced(peers[peer], peers[peer].asks[ask]))
    return [_table(found), _paced_table(paced)]


@asynccontextmanager
async def running_peers(folder: Path) -> AsyncIterator[Mapping[str, Peer]]:
    """Starts a Triton with the stand-ins, a gateway, and a load process for each peer."""
    write_models(folder / "models", KINDS.values())
    write_gateway_yaml(folder / "gateway.yaml", KINDS.values())
    settings = {**gateway.LARGE_BODIES, **gateway.SHARED_MEMORY, "GATEWAY_CONFIG": str(folder / "gateway.yaml")}
    v1, v2, direct = _asks()
    async with (
        running_triton(folder, folder / "models") as triton,
        gateway.started(gateway.NAME, triton, folder, v2 | v1, more=settings) as ours,
        load_process("http", urlsplit(triton.http_url).netloc, folder) as http,
        load_process("grpc", triton.grpc_url, folder) as grpc,
    ):
        of_triton = Peer(triton_http.NAME, triton.pid, http, v2), Peer(grpc_client.NAME, grpc.pid, grpc, direct)
        yield {peer.name: peer for peer in (ours, *of_triton)}


def _asks() -> tuple[dict[str, HttpAsk], dict[str, HttpAsk], Asks]:
    """Returns the requests for ``/v1``, for ``/v2`` of the gateway and of Triton, and for Triton's gRPC."""
    cases = {name: random_case(kind, random.Random(name), rows=1) for name, kind in KINDS.items()}
    stream = HttpAsk("/v2/models/speech/generate_stream", _body(cases["speech"]), event=b"data: ", end=LAST_CHUNK)
    v1 = {
        "speech": _v1(cases["speech"], "/stream", event=b"event: output", end=b"event: done"),
        "painter json": _v1(cases["painter"]),
        "trees": _v1(cases["trees"]),
    }
    v2 = {
        "speech": stream,
        "speech v2": stream,
        "painter": _v2(cases["painter"]),
        "painter json": _v2(cases["painter"], outputs=False),
        "video": _v2(cases["video"]),
        "yolo": _v2(cases["yolo"]),
        "yolo json": _v2(cases["yolo"], outputs=False),
        "trees v2": _v2(cases["trees"], inputs=False, outputs=False),
    }
    direct = {ask: _grpc(cases[ask.split()[0]]) for ask in v1 | v2}
    return v1, v2, direct


def _v1(case: Case, suffix: str = "", *, event: bytes = b"", end: bytes = b"") -> HttpAsk:
    return HttpAsk(f"/v1/pipelines/{case.kind.name}{suffix}", _body(case), event=event, end=end)


def _body(case: Case) -> bytes:
    return json_of(**body_of(case, batch=False))


def _v2(case: Case, *, inputs: bool = True, outputs: bool = True) -> HttpAsk:
    """``inputs``, ``outputs``: whether they are binary tensors."""
    body, headers = oip_request(case, binary_inputs=inputs, binary_outputs=outputs)
    return HttpAsk(f"/v2/models/{case.kind.name}/infer", body, "application/octet-stream", tuple(headers.items()))


def _grpc(case: Case) -> GrpcAsk:
    tensors = (TensorAsk(name, each.datatype, tuple(each.shape), each.raw) for name, each in case.inputs.items())
    return GrpcAsk(case.kind.name, tuple(tensors))


async def _measure_round(peers: Mapping[str, Peer], found: Found) -> None:
    triton_pid = peers[triton_http.NAME].pid
    for workload in random.sample(WORKLOADS, len(WORKLOADS)):
        for name in random.sample(list(peers), len(peers)):
            found.add(workload, name, await measure(peers[name], workload, triton_pid, SECONDS))


async def _paced(peer: Peer, ask: Ask) -> Paced:
    await peer.load.perform(Flood(ask, RATE, 0.0, WARM_UP_S, TICK_S, DRAIN_S))
    processes = [psutil.Process(pid) for pid in (peer.pid, *peer.workers)]
    before = sum(map(cpu_s, processes))
    answers = await peer.load.perform(Flood(ask, RATE, 0.0, PACED_S, TICK_S, DRAIN_S))
    cpu_ms = 1000 * (sum(map(cpu_s, processes)) - before) / answers.asked
    if not answers.good_s:
        raise UnexpectedAnswer(f"{peer.name} gave no answer: {answers.statuses}")
    p50_s, p99_s = (percentile(answers.good_s, percent) for percent in (50, 99))
    return Paced(len(answers.good_s) / answers.seconds, 1000 * p50_s, 1000 * p99_s, cpu_ms)


def _table(found: Found) -> Table:
    columns = ["", "gateway", "Triton, gRPC", "Triton, HTTP", "gateway / gRPC", "gateway / HTTP", "CPU of the gateway"]
    return Table("Large tensors", columns, [_row(each, found) for each in WORKLOADS], NOTE)


def _row(workload: Workload, found: Found) -> list[str]:
    def ms(sample: Sample) -> float:
        return 1000 * RESPONSES / sample.rate if workload.is_stream else sample.p50_ms

    def cpu_ms(sample: Sample) -> float:
        return sample.peer_us / 1000 * (RESPONSES if workload.is_stream else 1)

    names = (gateway.NAME, grpc_client.NAME, triton_http.NAME)
    times = [found.spread(workload, name, ms).text(1) for name in names]
    ratios = [found.compared(workload, (gateway.NAME, name), ms, lambda a, b: a / b).text(2) for name in names[1:]]
    return [workload.title, *times, *ratios, found.spread(workload, gateway.NAME, cpu_ms).text(1)]


def _paced_table(paced: Mapping[str, Sequence[Paced]]) -> Table:
    columns = ["", "answers/s", "p50", "p99", "CPU of the gateway"]
    return Table(f"{RATE:,} tiny requests a second", columns, [_paced_row(*each) for each in paced.items()], PACED_NOTE)


def _paced_row(name: str, samples: Sequence[Paced]) -> list[str]:
    def text(figure: str, digits: int) -> str:
        return Spread(tuple(getattr(sample, figure) for sample in samples)).text(digits)

    is_gateway = PACED[name][0] == gateway.NAME
    return [name, text("rate", 0), text("p50_ms", 1), text("p99_ms", 1), text("cpu_ms", 2) if is_gateway else NONE]
