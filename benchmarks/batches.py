"""10,000 images in one request, compared with a client's own loop over batches with NVIDIA's client."""

import asyncio
import gc
import random
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx
import numpy as np
import orjson
import psutil

from benchmarks.stage import Gateway, Triton, stage
from benchmarks.table import Table
from benchmarks.ticks import forget_peak, memory_of
from benchmarks.timing import Call, Durations, cpu_s, ratio, timed

IMAGES = 10_000
IMAGE_BYTES = 4096
AT_ONCE = 64
"""``max_batch_size`` of the model."""
CONNECTIONS = (4, 8)
"""Calls of the client's loop at a time. The best of them is the comparison."""
WORK_MS = (0, 10, 20, 40, 100)
"""How long the model works for each batch."""
MIB = 1024 * 1024
PIECE = 256 * 1024
"""The bytes that the client writes at once. Writing the whole form at once stops its event loop for 20 ms."""
SETTINGS = {"GATEWAY_MAX_BYTES_IN_FLIGHT": str(256 * MIB)}
COLUMNS = [
    "the model works",
    "one request",
    "best client loop",
    "at a time",
    "rate, times the loop (aim)",
    "memory, times the body (aim)",
]
NOTE = (
    f"One form with {IMAGES:,} files of {IMAGE_BYTES // 1024} KiB, which the gateway sends in parts of {AT_ONCE}, "
    "against `tritonclient.grpc.aio` with the same images in calls of 64 rows, with 4 and 8 calls at a time. "
    "The model has two instances, and sleeps while it works. The client of the one request sends the form in pieces of "
    f"{PIECE // 1024} KiB and reads the JSON answer with orjson. "
    "One request needs more time in two places, however long the model works: before the first part, until the whole "
    "form has arrived and is read; and after the last part, when the gateway writes "
    f"{IMAGES * 16:,} numbers as text and the client reads them. The loop gets these numbers as bytes with each call. "
    "The gateway keeps only one part more in Triton than the model has instances, so that another request has its turn "
    "soon. The loop keeps two or six calls more. "
    "Memory of the gateway's process: the peak of all requests."
)
CPU_COLUMNS = ["the model works", "", "client", "gateway", "Triton and the model", "sum", "sum, for each core"]
CPU_NOTE = (
    "Milliseconds of CPU for all images, without the model's sleep. No way is faster than its sum for each core, or "
    "than its longest thread: the gateway's for one request, the client's for the loop. The loop needs no gateway, so "
    "one request cannot reach its rate on two cores if the model does not work. A model that works longer limits both."
)


@dataclass(frozen=True)
class Case:
    """The durations of one way to send the images, and its CPU times in ms: client, gateway, and Triton with models."""

    durations: Durations
    cpu_ms: Sequence[float]

    def cells(self) -> list[str]:
        total = sum(self.cpu_ms)
        return [f"{each:.0f}" for each in (*self.cpu_ms, total, total / (psutil.cpu_count() or 1))]


async def run(rounds: int) -> list[Table]:
    images = [np.random.default_rng(number).bytes(IMAGE_BYTES) for number in range(IMAGES)]
    gc.freeze()  # otherwise a collection of all objects of this process falls into a measurement now and then
    rows, cpu_rows = [], []
    async with stage(SETTINGS) as on:
        for work_ms in WORK_MS:
            row, of_cpu = await _rows(on.gateway, on.triton, images, work_ms, rounds)
            rows.append(row)
            cpu_rows += of_cpu
    return [Table("Many items in one request", COLUMNS, rows, NOTE), Table("CPU", CPU_COLUMNS, cpu_rows, CPU_NOTE)]


async def _rows(
    gateway: Gateway, triton: Triton, images: Sequence[bytes], work_ms: int, rounds: int
) -> tuple[list[str], list[list[str]]]:
    form = httpx.Request("POST", gateway.url, files=[("image", image) for image in images], data={"work_ms": work_ms})
    body = form.read()
    before = memory_of(gateway.pid, "VmRSS")
    forget_peak(gateway.pid)
    cases: dict[str, Call] = {"gateway": partial(_post, gateway, body, form.headers["content-type"])}
    cases |= {str(calls): partial(_loop, triton, images, work_ms, calls) for calls in CONNECTIONS}
    found = await _measured(cases, rounds, gateway, triton)
    memory = (memory_of(gateway.pid, "VmHWM") - before) / len(body)
    ours = found.pop("gateway")
    calls, best = min(found.items(), key=lambda item: item[1].durations.median_ms)
    times = [str(ours.durations), str(best.durations), calls, f"{ratio(best.durations, ours.durations)} (1.0)"]
    named = {"one request": ours, f"client loop, {calls} at a time": best}
    return (
        [f"{work_ms} ms", *times, f"{memory:.1f} (2.5)"],
        [[f"{work_ms} ms", name, *case.cells()] for name, case in named.items()],
    )


async def _measured(cases: Mapping[str, Call], rounds: int, gateway: Gateway, triton: Triton) -> dict[str, Case]:
    """Runs each case once per round, in a random order, and once before to warm up."""
    server = psutil.Process(triton.pid)
    groups = [psutil.Process()], [psutil.Process(gateway.pid)], [server, *server.children(recursive=True)]
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    cpu_ms: dict[str, list[list[float]]] = {name: [] for name in cases}
    for number in range(1 + rounds):
        for name in random.sample(list(cases), len(cases)):
            before = [sum(map(cpu_s, group)) for group in groups]
            duration = await timed(cases[name])
            used = [1000 * (sum(map(cpu_s, group)) - start) for group, start in zip(groups, before, strict=True)]
            if number:
                seconds[name].append(duration)
                cpu_ms[name].append(used)
    return {
        name: Case(
            Durations(tuple(seconds[name])), [statistics.median(each) for each in zip(*cpu_ms[name], strict=True)]
        )
        for name in cases
    }


async def _post(gateway: Gateway, body: bytes, content_type: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE):
            yield body[start : start + PIECE]

    headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
    answer = await gateway.client.post("/v1/pipelines/bench_rows", content=pieces(), headers=headers)
    assert len(orjson.loads(answer.raise_for_status().content)["scores"]) == IMAGES


async def _loop(triton: Triton, images: Sequence[bytes], work_ms: int, calls: int) -> None:
    """Sends the batches with ``calls`` calls at a time, and joins the answers."""
    starts = iter(range(0, len(images), AT_ONCE))
    joined = np.empty((len(images), 16), np.float32)

    async def send() -> None:
        for start in starts:
            some = np.array(images[start : start + AT_ONCE], np.object_).reshape(-1, 1)
            work = np.full((len(some), 1), work_ms, np.int32)
            answer = await triton.infer("bench_rows", {"IMAGE": some, "WORK_MS": work})
            joined[start : start + len(some)] = answer.as_numpy("SCORES")

    await asyncio.gather(*(send() for _ in range(calls)))
