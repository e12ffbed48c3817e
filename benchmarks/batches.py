"""10,000 images in one request, compared with a client's own loop over batches with NVIDIA's client."""

import asyncio
from collections.abc import Sequence
from functools import partial

import httpx
import numpy as np
import orjson

from benchmarks.stage import Gateway, Triton, stage
from benchmarks.table import Table
from benchmarks.ticks import forget_peak, memory_of
from benchmarks.timing import Call, interleaved, ratio

IMAGES = 10_000
IMAGE_BYTES = 4096
AT_ONCE = 64
"""``max_batch_size`` of the model."""
CONNECTIONS = (1, 2, 4, 8)
"""Calls of the client's loop at a time. The best of them is the comparison."""
WORK_MS = (0, 10)
"""How long the model works for each batch."""
MIB = 1024 * 1024
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
    "against `tritonclient.grpc.aio` with the same images in calls of 64 rows, with 1, 2, 4 and 8 calls at a time. "
    "The model has two instances, and sleeps while it works. The client reads the JSON answer with orjson. Memory of "
    "the gateway's process: the peak of all requests."
)


async def run(rounds: int) -> list[Table]:
    images = [np.random.default_rng(number).bytes(IMAGE_BYTES) for number in range(IMAGES)]
    async with stage(SETTINGS) as on:
        rows = [await _row(on.gateway, on.triton, images, work_ms, rounds) for work_ms in WORK_MS]
    return [Table("Many items in one request", COLUMNS, rows, NOTE)]


async def _row(gateway: Gateway, triton: Triton, images: Sequence[bytes], work_ms: int, rounds: int) -> list[str]:
    form = httpx.Request("POST", gateway.url, files=[("image", image) for image in images], data={"work_ms": work_ms})
    body = form.read()
    before = memory_of(gateway.pid, "VmRSS")
    forget_peak(gateway.pid)
    cases: dict[str, Call] = {"gateway": partial(_post, gateway, body, form.headers["content-type"])}
    cases |= {str(calls): partial(_loop, triton, images, work_ms, calls) for calls in CONNECTIONS}
    found = await interleaved(cases, rounds, warm_up=1)
    memory = (memory_of(gateway.pid, "VmHWM") - before) / len(body)
    ours = found.pop("gateway")
    calls, best = min(found.items(), key=lambda item: item[1].median_ms)
    return [f"{work_ms} ms", str(ours), str(best), calls, f"{ratio(best, ours)} (1.0)", f"{memory:.1f} (2.5)"]


async def _post(gateway: Gateway, body: bytes, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    answer = await gateway.client.post("/v1/pipelines/bench_rows", content=body, headers=headers)
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
