"""The cost of a large tensor over the wire and through shared memory, with the gateway's engine and one Triton."""

import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from app.core.inference import Deadline, InferenceRequest, Tensor
from app.observability.metrics import Metrics, SharedMemoryMetrics
from app.shared_memory.leases import SharedMemory
from app.triton.connect import open_transport
from app.triton.engine import TritonEngine
from app.triton.service import MAX_MESSAGE_BYTES, RegisteredRegions
from benchmarks.stage import running_triton
from benchmarks.table import Table

KIB = 1024
PIXELS = 150_528
TIMEOUT_S = 60.0
CALLS = 5
"""Consecutive calls of each measurement."""
_LIMIT = 256 * KIB * KIB


@dataclass(frozen=True)
class Case:
    title: str
    request: InferenceRequest


@dataclass(frozen=True)
class Cost:
    """The cost of one call."""

    cpu_ms: float
    elapsed_ms: float


async def run(rounds: int) -> list[Table]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        async with (
            running_triton(Path(folder)) as triton,
            _engine(triton.grpc_url, uses_shared_memory=False) as wire,
            _engine(triton.grpc_url, uses_shared_memory=True) as memory,
        ):
            return [await _table(case, wire, memory, rounds) for case in (_inputs(), _both_ways())]


@asynccontextmanager
async def _engine(url: str, *, uses_shared_memory: bool) -> AsyncIterator[TritonEngine]:
    async with open_transport(url, fast_pings=True) as transport:
        memory = (
            SharedMemory(
                RegisteredRegions(transport),
                _LIMIT,
                MAX_MESSAGE_BYTES,
                SharedMemoryMetrics(Metrics("benchmark")),
                large_bytes=1,
            )
            if uses_shared_memory
            else None
        )
        engine = TritonEngine(transport, shared_memory=memory)
        for model in ("bench_head_b", "bench_pixels"):
            await engine.model_config(model)
        yield engine
        if memory is not None:
            await memory.close()


def _inputs() -> tuple[str, list[Case]]:
    sizes = (64, 128, 256, 512, 1024, 4 * KIB, 16 * KIB)
    title = "An input; the answer is two numbers"
    return title, [Case(_size_text(size), _request("bench_head_b", "FEATURES", (size * KIB // 4,))) for size in sizes]


def _both_ways() -> tuple[str, list[Case]]:
    title = "An input, and an output of the same size"
    items = (1, 2, 7, 28)
    return title, [
        Case(f"{n * PIXELS * 4 / 1e6:.1f} MB", _request("bench_pixels", "INPUT", (n, PIXELS))) for n in items
    ]


def _size_text(kib: int) -> str:
    return f"{kib} KiB" if kib < KIB else f"{kib // KIB} MiB"


def _request(model: str, name: str, shape: tuple[int, ...]) -> InferenceRequest:
    array = np.random.default_rng(7).standard_normal(shape, np.float32)
    return InferenceRequest(model, (Tensor(name, "FP32", array),))


async def _table(titled: tuple[str, list[Case]], wire: TritonEngine, memory: TritonEngine, rounds: int) -> Table:
    title, cases = titled
    costs: dict[tuple[str, str], list[Cost]] = {(case.title, way): [] for case in cases for way in ("wire", "memory")}
    measured = [(case, way, engine) for case in cases for way, engine in (("wire", wire), ("memory", memory))]
    for number in range(rounds + 1):
        for case, way, engine in random.sample(measured, len(measured)):
            cost = await _cost(engine, case.request)
            if number:
                costs[case.title, way].append(cost)
    rows = [_row(case.title, costs[case.title, "wire"], costs[case.title, "memory"]) for case in cases]
    note = "Medians for one call: CPU time of the client's process, and elapsed time, in ms."
    return Table(
        title,
        ["tensor", "CPU, wire", "CPU, shared memory", "ratio", "p50, wire", "p50, shared memory", "ratio"],
        rows,
        note,
    )


async def _cost(engine: TritonEngine, request: InferenceRequest) -> Cost:
    cpu_s, start = time.process_time(), time.perf_counter()
    for _ in range(CALLS):
        await engine.infer(request, Deadline.after(TIMEOUT_S))
    cpu_s, elapsed_s = time.process_time() - cpu_s, time.perf_counter() - start
    return Cost(1000 * cpu_s / CALLS, 1000 * elapsed_s / CALLS)


def _row(title: str, wire: list[Cost], memory: list[Cost]) -> list[str]:
    pairs = [
        (median(cost.cpu_ms for cost in wire), median(cost.cpu_ms for cost in memory)),
        (median(cost.elapsed_ms for cost in wire), median(cost.elapsed_ms for cost in memory)),
    ]
    return [title, *(cell for pair in pairs for cell in _cells(*pair))]


def _cells(wire_ms: float, memory_ms: float) -> tuple[str, str, str]:
    return f"{wire_ms:.2f}", f"{memory_ms:.2f}", f"{wire_ms / memory_ms:.1f}x"
