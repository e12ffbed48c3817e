"""`python -m benchmarks streams`: the relay of a language model's streams, disconnects, and events beside a large body.

The model has the tensors of NVIDIA's vLLM backend, computes nothing, and writes a token each 2 ms for each stream.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.compare import CPU, P50, Comparison, Goal, Workload, ratio, say
from benchmarks.contents import json_of
from benchmarks.figure import Figure
from benchmarks.load.orders import GrpcAsk, HttpAsk, Relay, TensorAsk, Unary, request_of
from benchmarks.peers.servers import BARE, SSE, TRITON, bytes_ask
from benchmarks.servers import (
    MIB,
    SHARED_MEMORY,
    Peer,
    Start,
    direct_client,
    load_process,
    running_gateway,
    running_triton,
)
from benchmarks.spread import Spread
from benchmarks.table import Table

TOKENS = 200
STREAM_S = 0.4
CHAT, PIPELINE = "this gateway, chat", "this gateway, `/stream`"
FLAGS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens")
SAMPLING = f'{{"max_tokens": {TOKENS}}}'
NOTE = (
    f"Streams of {TOKENS} tokens, a token each 2 ms. A reader reads one after the other; the readers do "
    "not start together. `generate_stream` answers without counts and end event."
)
ASKS = {
    CHAT: HttpAsk(
        "/v1/chat/completions",
        json_of(messages=[{"role": "user", "content": "Hi"}], model="bench_llm", stream=True, max_tokens=TOKENS),
        event=b'"content":" word"',
        end=b"[DONE]",
    ),
    PIPELINE: HttpAsk("/v1/pipelines/bench_llm/stream", json_of(prompt="Hi", max_tokens=TOKENS), **SSE),
    TRITON: HttpAsk(
        "/v2/models/bench_llm/generate_stream",
        json_of(text_input="Hi", sampling_parameters=SAMPLING, **dict.fromkeys(FLAGS, True)),
        event=b"data: ",
        end=b"\r\n0\r\n\r\n",
    ),
    BARE: GrpcAsk(
        "bench_llm",
        (
            bytes_ask("text_input", (1,), [b"Hi"]),
            bytes_ask("sampling_parameters", (1,), [SAMPLING.encode()]),
            *(TensorAsk(name, "BOOL", (1,), b"\1") for name in (*FLAGS, "return_num_output_tokens")),
        ),
    ),
}
PEERS: dict[str, Start] = {
    CHAT: partial(running_gateway, CHAT, asks={"tokens": ASKS[CHAT]}),
    PIPELINE: partial(running_gateway, PIPELINE, asks={"tokens": ASKS[PIPELINE]}),
    TRITON: partial(direct_client, TRITON, "http", asks={"tokens": ASKS[TRITON]}),
    BARE: partial(direct_client, BARE, "grpc", asks={"tokens": ASKS[BARE]}),
}
WORKLOADS = tuple(
    Workload(f"{n} stream{'s' * (n > 1)} at a time", "tokens", n, STREAM_S, unit="token") for n in (1, 16, 64)
)
GOALS = tuple(
    goal
    for each in WORKLOADS
    for goal in (
        Goal(
            f"{each.title}: CPU of a token, chat, against `/stream`",
            1.3,
            1.1,
            ratio(each, CHAT, PIPELINE, CPU),
            lower=True,
        ),
        Goal(
            f"{each.title}: first event, chat, against `generate_stream`",
            None,
            1.2,
            ratio(each, CHAT, TRITON, P50),
            lower=True,
        ),
    )
)
COMPARISON = Comparison(PEERS, WORKLOADS, GOALS, note=NOTE, seconds=1.0, warm_up_s=0.5, cpu_elsewhere=(TRITON,))
AIMS_MS = {8: (20, 10), 32: (50, 30)}
"""Size of a body in MiB -> the longest allowed wait of an event of another stream, and the aim."""
WATCHED_S = 4.0
BODIES = {"max_body_bytes": str(64 * MIB), "max_bytes_in_flight": str(256 * MIB)}
LEAVES = 100


async def run(rounds: int) -> list[Table | Figure]:
    tables = await COMPARISON.run(rounds)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as path, running_triton(Path(path)) as triton:
        gaps = []
        for name, more in (("over gRPC", {}), ("through shared memory", SHARED_MEMORY)):
            async with running_gateway(name, triton, Path(path), {}, **BODIES, **more) as peer:
                for size_mib in AIMS_MS:
                    say(f"a body of {size_mib} MiB, tensors {name}")
                    gaps.append([f"{size_mib} MiB, tensors {name}", *await _gaps(peer, Path(path), size_mib, rounds)])
        async with running_gateway("left", triton, Path(path), {}) as peer:
            left = [await _leaving(peer, Path(path), when, until) for when, until in _MOMENTS.items()]
    columns = ["body", "answered in, ms", "an event waits, ms", "at most (aim)", "without the body, ms"]
    note = (
        "Another stream sends an event every 2 ms. The wait is the longest time between two events of a round, minus "
        "these 2 ms. The answer has as many floats as the body."
    )
    return [
        *tables,
        Table("Events beside a large JSON body", columns, gaps, note),
        Table(f"{LEAVES} disconnects", ["when", "ms until the model detects it", "worst"], left),
    ]


async def _gaps(peer: Peer, folder: Path, size_mib: int, rounds: int) -> list[str]:
    some = np.random.default_rng(7).standard_normal(100_000, np.float32)
    count = round(size_mib * MIB / (len(json_of(input=some)) / len(some)))
    large = Unary((HttpAsk("/v1/pipelines/bench_identity", json_of(input=np.resize(some, count))),), 0.0)
    ticks = HttpAsk("/v1/pipelines/bench_stream/stream", json_of(count=round(WATCHED_S / 0.002), interval_ms=2), **SSE)
    answered_ms, waits_ms, idle_ms = list[float](), list[float](), list[float]()
    async with load_process("http", urlsplit(peer.url).netloc, folder) as other:
        for _ in range(rounds):
            for sends, into in ((False, idle_ms), (True, waits_ms)):
                reading = asyncio.create_task(peer.load.perform(Relay((ticks,), 0.1)))
                await asyncio.sleep(0.5)
                if sends:
                    answered_ms += [1000 * each for each in (await other.perform(large)).durations]
                into.append(1000 * (await reading).longest_gap_s - 2)
    highest, aim = AIMS_MS[size_mib]
    found = [Spread(each).text(1) for each in (answered_ms, waits_ms, idle_ms)]
    return [*found[:2], f"{highest} ({aim})", found[2]]


_MOMENTS = {"mid-stream": b"id: 3\n", "before the first output": b""}


async def _leaving(peer: Peer, folder: Path, when: str, until: bytes) -> list[str]:
    """Measures the time from the disconnect until the model detects it. The model checks every 2 ms."""
    found_ms: Sequence[float] = [1000 * await _left_s(peer, folder / f"{when}-{n}", until) for n in range(LEAVES)]
    return [when, Spread(found_ms).text(1), f"{max(found_ms):.1f}"]


async def _left_s(peer: Peer, notice: Path, until: bytes) -> float:
    body = json_of(count=200, interval_ms=20 if until else 2_000, notice=str(notice))
    address = urlsplit(peer.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request_of(HttpAsk("/v1/pipelines/bench_stream/stream", body)))
    seen = b""
    while until not in seen:
        seen += await reader.read(65536)
    await asyncio.sleep(0.05)
    left = time.monotonic()
    writer.transport.abort()
    while not (said := notice.read_text() if notice.exists() else ""):  # noqa: ASYNC240 - a few bytes
        await asyncio.sleep(0.005)
    return float(said) - left
