"""The lower bound: a bare grpc.aio client that calls Triton directly, without a server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from benchmarks.load.orders import GrpcAsk, TensorAsk
from benchmarks.load.process import load_process
from benchmarks.peers.contents import (
    BINARY,
    BLANK,
    EVENTS,
    FILE,
    IDLE_INTERVAL_MS,
    INSIGHTS,
    LARGE,
    SENTIMENTS,
    SMALL,
    TEXT,
    TOPICS,
)
from benchmarks.peers.peer import Asks, Peer
from benchmarks.stage import Triton

NAME = "bare grpc.aio client"


@asynccontextmanager
async def start(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    async with load_process("grpc", triton.grpc_url, folder) as load:
        yield Peer(NAME, load.pid, load, asks())


def asks() -> Asks:
    insights = (_texts("TEXT", [TEXT]), _texts("TOPICS", TOPICS), _texts("SENTIMENTS", SENTIMENTS))
    return {
        "small": GrpcAsk("bench_identity", (_floats(SMALL),)),
        "large": GrpcAsk("bench_identity", (_floats(LARGE),)),
        "file": GrpcAsk("bench_file", (bytes_ask("FILE", (1,), [FILE]),)),
        **{name: GrpcAsk("bench_file", (bytes_ask("FILE", (1,), [file]),)) for name, file in BINARY.items()},
        "early exit": GrpcAsk("ocr_ensemble", (bytes_ask("IMAGE", (1, 1), [BLANK]),), error="ALREADY_EXISTS"),
        **{name: GrpcAsk(name, insights) for name in INSIGHTS},
        "stream": GrpcAsk("bench_stream", (_count(EVENTS),)),
        "idle stream": GrpcAsk("bench_stream", (_count(1_000),), interval_ms=IDLE_INTERVAL_MS),
    }


def _floats(values: np.ndarray) -> TensorAsk:
    return TensorAsk("INPUT", "FP32", values.shape, values.tobytes())


def _count(events: int) -> TensorAsk:
    return TensorAsk("COUNT", "INT32", (1,), np.array([events], np.int32).tobytes())


def _texts(name: str, texts: Sequence[str]) -> TensorAsk:
    return bytes_ask(name, (1, len(texts)), [text.encode() for text in texts])


def bytes_ask(name: str, shape: tuple[int, ...], values: Sequence[bytes]) -> TensorAsk:
    raw = b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return TensorAsk(name, "BYTES", shape, raw)
