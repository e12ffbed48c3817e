"""`python -m benchmarks llm`: the relay of a language model's stream, in OpenAI's form and others.

The model has the tensors of NVIDIA's vLLM backend, computes nothing, and writes a token each 2 ms for each stream.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.load.orders import HttpAsk, request_of
from benchmarks.peers.contents import json_of
from benchmarks.stage import Stage, stage
from benchmarks.table import Table
from benchmarks.timing import cpu_s, percentile

STREAMS = (1, 16, 64)
TOKENS = 200
STEP_S = 0.002
"""The model's time for a token."""
LEAST = 16
"""Streams that are read in a round."""
CHAT, PIPELINE = "this gateway, chat", "this gateway, `/stream`"
GENERATE, BARE = "Triton's `generate_stream`", "a bare grpc.aio reader"
FLAGS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens")
NOTE = (
    f"Streams of {TOKENS} tokens. A reader reads one after the other; the readers do not start together. A figure is "
    "the median of the rounds; first events are of all streams. The aim for the first event is 1.2 times that of "
    "`generate_stream`, whose answers have no counts and no end event. CPU: of the gateway, or of the reader of gRPC, "
    "for one token. The readers share the processors with the servers."
)

Read = Callable[[], Awaitable[float]]
"""Reads one stream to its end, and returns the seconds to its first event. Raises AssertionError."""


@dataclass
class Found:
    """The measurements of one reader. ``cpu_us``: for one token."""

    rates: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


async def run(rounds: int) -> list[Table]:
    async with stage() as on:
        readers = _readers(on)
        processes = {CHAT: on.gateway.pid, PIPELINE: on.gateway.pid, BARE: os.getpid()}
        tables = []
        for streams in STREAMS:
            found = {name: Found() for name in readers}
            for number in range(rounds + 1):
                for name in random.sample(list(readers), len(readers)):
                    into = found[name] if number else Found()
                    await _measure(readers[name], streams, processes.get(name), into)
            tables.append(_table(streams, found))
        return tables


def _readers(on: Stage) -> dict[str, Read]:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "bench_llm", "stream": True}
    flags = dict.fromkeys(FLAGS, True)
    asks = {
        CHAT: (
            on.gateway.url,
            HttpAsk(
                "/v1/chat/completions", json_of(**chat, max_tokens=TOKENS), event=b'"content":" word"', end=b"[DONE]"
            ),
        ),
        PIPELINE: (
            on.gateway.url,
            HttpAsk(
                "/v1/pipelines/bench_llm/stream",
                json_of(prompt="Hi", max_tokens=TOKENS),
                event=b"event: output",
                end=b"event: done",
            ),
        ),
        GENERATE: (
            on.triton.http_url,
            HttpAsk(
                "/v2/models/bench_llm/generate_stream",
                json_of(text_input="Hi", sampling_parameters=f'{{"max_tokens": {TOKENS}}}', **flags),
                event=b"data: ",
                end=b"\r\n0\r\n\r\n",
            ),
        ),
    }
    readers: dict[str, Read] = {name: partial(_read_http, *each) for name, each in asks.items()}
    return readers | {BARE: partial(_read_grpc, on.triton.grpc_url)}


async def _measure(read: Read, streams: int, pid: int | None, found: Found) -> None:
    process = psutil.Process(pid)
    before, started = cpu_s(process), time.perf_counter()
    repeats = max(LEAST // streams, 2)

    async def reader(number: int) -> None:
        await asyncio.sleep(number / streams * TOKENS * STEP_S)
        for _ in range(repeats):
            found.firsts_s.append(await read())

    await asyncio.gather(*map(reader, range(streams)))
    tokens = repeats * streams * TOKENS
    found.rates.append(tokens / (time.perf_counter() - started))
    if pid is not None:
        found.cpu_us.append(1e6 * (cpu_s(process) - before) / tokens)


async def _read_http(url: str, ask: HttpAsk) -> float:
    address = urlsplit(url)
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    try:
        writer.write(request_of(ask))
        first_s, events, tail = 0.0, 0, b""
        while ask.end not in tail:
            chunk = await reader.read(1 << 18)
            assert chunk, tail
            overlap = tail[1 - len(ask.event) :]
            events += (overlap + chunk).count(ask.event)
            first_s = first_s or (time.perf_counter() - started if events else 0.0)
            tail = (tail + chunk)[-300:]
    finally:
        writer.transport.abort()
    assert events >= TOKENS, (ask.path, events, tail)
    return first_s


async def _read_grpc(url: str) -> float:
    started = time.perf_counter()
    async with grpc.aio.insecure_channel(url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(_request())
        await call.done_writing()
        first_s, outputs = 0.0, 0
        async for message in call:
            outputs += bool(message.infer_response.outputs)
            first_s = first_s or time.perf_counter() - started
    assert outputs == TOKENS
    return first_s


def _request() -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="bench_llm")
    for name, value in (("text_input", "Hi"), ("sampling_parameters", f'{{"max_tokens": {TOKENS}}}')):
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value.encode())
    for name in (*FLAGS, "return_num_output_tokens"):
        request.inputs.add(name=name, datatype="BOOL", shape=[1])
        request.raw_input_contents.append(np.array([True]).tobytes())
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def _table(streams: int, found: Mapping[str, Found]) -> Table:
    columns = ["reader", "tokens/s", "first event p50, ms", "p99, ms", "p50 / `generate_stream`", "CPU us/token"]
    rows = [_row(name, each, found[GENERATE]) for name, each in found.items()]
    return Table(
        f"{streams} stream{'s' * (streams > 1)} at a time", columns, rows, NOTE if streams == STREAMS[0] else ""
    )


def _row(name: str, found: Found, generate: Found) -> Sequence[str]:
    p50_s, p99_s = (percentile(found.firsts_s, percent) for percent in (50, 99))
    return [
        name,
        f"{statistics.median(found.rates):,.0f}",
        f"{1000 * p50_s:.1f}",
        f"{1000 * p99_s:.1f}",
        f"{p50_s / percentile(generate.firsts_s, 50):.2f}",
        f"{statistics.median(found.cpu_us):.0f}" if found.cpu_us else "",
    ]
