"""This gateway with its defaults: one worker, a JSON log line for each request."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.load.orders import HttpAsk
from benchmarks.load.process import load_process
from benchmarks.peers.contents import (
    BINARY,
    BLANK,
    EVENTS,
    FILE,
    FORM,
    IDLE_INTERVAL_MS,
    INSIGHTS,
    LARGE,
    SMALL,
    TEXT,
    form_of,
    json_of,
)
from benchmarks.peers.peer import Asks, Peer
from benchmarks.stage import Triton, running_gateway

NAME = "this gateway"
LARGE_BODIES = {"GATEWAY_MAX_BODY_BYTES": str(32 * 2**20)}
SHARED_MEMORY = {"GATEWAY_SHARED_MEMORY_BYTES": str(256 * 2**20)}
"""The default with the embedded Triton."""


def start(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    return started(NAME, triton, folder, asks(), more=LARGE_BODIES | SHARED_MEMORY)


@asynccontextmanager
async def started(name: str, triton: Triton, folder: Path, asks: Asks, **options: Any) -> AsyncIterator[Peer]:
    """Starts a gateway with its own folder in ``folder``. ``options``: see :func:`benchmarks.stage.running_gateway`."""
    own = folder / name.replace(" ", "-")
    own.mkdir()
    options["more"] = {"GATEWAY_LOG_LEVEL": "info", **options.get("more", {})}
    async with (
        running_gateway(own, triton, **options) as gateway,
        load_process("http", urlsplit(gateway.url).netloc, own) as load,
    ):
        others = tuple(child.pid for child in psutil.Process(gateway.pid).children())
        yield Peer(name, gateway.pid, load, asks, others)


def asks() -> Asks:
    return {
        "small": _post("bench_identity", json_of(input=SMALL)),
        "large": _post("bench_identity", json_of(input=LARGE)),
        "file": _post("bench_file", form_of("file", FILE), FORM),
        **binary_asks(),
        "early exit": _post("ocr", form_of("image", BLANK), FORM),
        **{name: _post(name, json_of(text=TEXT)) for name in INSIGHTS},
        "stream": _stream(count=EVENTS),
        "idle stream": _stream(count=1_000, interval_ms=IDLE_INTERVAL_MS),
    }


def binary_asks() -> Asks:
    return {name: _post("bench_file", file, "application/octet-stream") for name, file in BINARY.items()}


def _post(pipeline: str, body: bytes, content_type: str = "application/json") -> HttpAsk:
    return HttpAsk(f"/v1/pipelines/{pipeline}", body, content_type)


def _stream(**fields: int) -> HttpAsk:
    path = "/v1/pipelines/bench_stream/stream"
    return HttpAsk(path, json_of(**fields), event=b"event: output", end=b"event: done")
