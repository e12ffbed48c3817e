"""The cost of a stream, compared with a bare gRPC reader and Triton's generate_stream; idle and cancelled streams."""

import asyncio
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.stage import Stage, stage
from benchmarks.table import Table
from benchmarks.timing import Call, Durations, cpu_s, interleaved

EVENTS = 5_000
IDLE_STREAMS = (1_000, 5_000)
LEAVES = 100
CHUNKS = (1, 4, 16, 64)
TOKENS = 256


async def run(rounds: int) -> list[Table]:
    """Runs all measurements with one Triton and one gateway with one worker."""
    async with stage() as on:
        return [
            await _relay(on, max(rounds // 3, 5)),
            await _chunks(on, max(rounds // 3, 5)),
            await _leaving(on),
            await _idle(on),
        ]


async def _relay(on: Stage, rounds: int) -> Table:
    used_s: dict[str, list[float]] = {}

    async def watched(name: str, pid: int, read: Call) -> None:
        process = psutil.Process(pid)
        before = cpu_s(process)
        await read()
        used_s.setdefault(name, []).append(cpu_s(process) - before)

    read: dict[str, tuple[int, Call]] = {
        "a bare grpc.aio reader": (os.getpid(), partial(_bare_reader, on)),
        "this gateway, as SSE": (
            on.gateway.pid,
            partial(_read_sse, on.gateway.url, "bench_stream", {"count": EVENTS}),
        ),
    }
    cases: dict[str, Call] = {name: partial(watched, name, *each) for name, each in read.items()}
    found = await interleaved(cases | {"Triton's generate_stream": partial(_generate_stream, on)}, rounds, warm_up=1)
    bare = found["a bare grpc.aio reader"]
    rows = [
        [
            name,
            str(durations),
            f"{EVENTS / durations.median_ms * 1000:,.0f}",
            f"{bare.median_ms / durations.median_ms:.2f}",
            f"{statistics.median(used_s[name]) / EVENTS * 1e6:.0f}" if name in used_s else "",
        ]
        for name, durations in found.items()
    ]
    note = (
        "One stream at a time. The ratio is of events per second to the bare reader's; aimed at: 0.95. "
        "CPU of the reader's process, or of the gateway; aimed at: 45."
    )
    return Table(f"{EVENTS:,} events of one stream", ["reader", "ms", "events/s", "ratio", "CPU us/event"], rows, note)


async def _chunks(on: Stage, rounds: int) -> Table:
    sizes: dict[int, tuple[int, int]] = {}
    firsts: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}

    async def write(chunk: int) -> None:
        body = {
            "prompt": "The for statement",
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "seed": 5,
            "chunk_tokens": chunk,
        }
        first_s, *size = await _read_sse(on.gateway.url, "write", body)
        sizes[chunk] = (size[0], size[1])
        firsts[chunk].append(first_s)

    found = await interleaved({str(chunk): partial(write, chunk) for chunk in CHUNKS}, rounds, warm_up=1)
    rows = [
        [
            str(chunk),
            str(found[str(chunk)]),
            str(Durations(tuple(firsts[chunk]))),
            f"{sizes[chunk][0]:,}",
            str(sizes[chunk][1]),
            f"{sizes[chunk][1] / found[str(chunk)].median_ms * 1000:,.0f}",
        ]
        for chunk in CHUNKS
    ]
    columns = ["chunk_tokens", "whole text, ms", "first output, ms", "bytes", "outputs", "outputs/s"]
    return Table("One text of `write`, in chunks", columns, rows)


async def _leaving(on: Stage) -> Table:
    """Measures the time from the disconnect until the model detects it. The model checks every 2 ms."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, until in (("mid-stream", b"id: 3\n"), ("before the first output", b"")):
            seconds = [await _leave(on, Path(folder) / f"{name}-{index}", until) for index in range(LEAVES)]
            found = Durations(tuple(seconds))
            rows.append([name, str(found), f"{max(seconds) * 1000:.1f}"])
    return Table(f"{LEAVES} disconnects", ["when", "ms until the model detects it", "worst"], rows)


async def _leave(on: Stage, notice: Path, until: bytes) -> float:
    body = {"count": 200, "interval_ms": 20 if until else 2_000, "notice": str(notice)}
    reader, writer = await _post(on.gateway.url, "bench_stream", body)
    seen = b""
    while until not in seen:
        seen += await reader.read(65536)
    await asyncio.sleep(0.05)
    left = time.monotonic()
    writer.transport.abort()
    while not (said := await asyncio.to_thread(_text_of, notice)):
        await asyncio.sleep(0.005)
    return float(said) - left


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def _idle(on: Stage) -> Table:
    process = psutil.Process(on.gateway.pid)
    held = [*await _open_idle(on, 50)]
    await asyncio.sleep(1)
    before, opened, rows = process.memory_info().rss, 0, []
    for count in IDLE_STREAMS:
        held += await _open_idle(on, count - opened)
        opened = count
        await asyncio.sleep(2)
        rows.append([f"{count:,}", f"{(process.memory_info().rss - before) / count / 1024:.1f} KiB"])
    for writer in held:
        writer.transport.abort()
    note = "Resident memory of the gateway, its call to Triton included: one open gRPC stream for each."
    return Table("Idle streams", ["open streams", "memory of each"], rows, note)


async def _open_idle(on: Stage, count: int) -> list[asyncio.StreamWriter]:
    """Opens streams that have sent their head and wait for the model."""
    opened = []
    for _ in range(count):
        reader, writer = await _post(on.gateway.url, "bench_stream", {"count": 1_000, "interval_ms": 600_000})
        opened.append((reader, writer))
        if len(opened) % 50 == 0:
            await asyncio.gather(*(reader.readuntil(b": \n\n") for reader, _ in opened[-50:]))
    return [writer for _, writer in opened]


async def _bare_reader(on: Stage) -> None:
    async with grpc.aio.insecure_channel(on.triton.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        await call.write(_request())
        await call.done_writing()
        outputs = 0
        async for message in call:
            outputs += bool(message.infer_response.outputs)
        assert outputs == EVENTS


def _request() -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="bench_stream")
    request.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    request.raw_input_contents.append(np.array([EVENTS], dtype=np.int32).tobytes())
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


async def _read_sse(url: str, pipeline: str, body: dict[str, Any]) -> tuple[float, int, int]:
    """Reads a stream to its end. Returns the seconds to the first output, the bytes and the outputs."""
    start = time.perf_counter()
    reader, writer = await _post(url, pipeline, body)
    first_s, size, outputs, tail = 0.0, 0, 0, b""
    try:
        while b"event: done" not in tail:
            chunk = await reader.read(1 << 18)
            assert chunk, tail
            size += len(chunk)
            outputs += (tail[-12:] + chunk).count(b"event: output") - tail[-12:].count(b"event: output")
            first_s = first_s or (time.perf_counter() - start if outputs else 0.0)
            tail = (tail + chunk)[-300:]
    finally:
        writer.transport.abort()
    return first_s, size, outputs


async def _post(url: str, pipeline: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await _send(url, f"/v1/pipelines/{pipeline}/stream", json.dumps(body).encode())


async def _generate_stream(on: Stage) -> None:
    body = json.dumps({"COUNT": EVENTS}).encode()
    reader, writer = await _send(on.triton.http_url, "/v2/models/bench_stream/generate_stream", body)
    outputs, tail = 0, b""
    while outputs < EVENTS:
        chunk = await reader.read(1 << 18)
        assert chunk, tail
        outputs += (tail + chunk).count(b"data: ")
        tail = (tail + chunk)[-5:]
    writer.transport.abort()


async def _send(url: str, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer
