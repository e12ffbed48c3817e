"""A simple application with FastAPI, pydantic and tritonclient.grpc.aio: `plain_fastapi_app.py`."""

import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.load.orders import HttpAsk
from benchmarks.peers.contents import BLANK, EVENTS, FILE, FORM, IDLE_INTERVAL_MS, LARGE, SMALL, form_of, json_of
from benchmarks.peers.peer import Asks, Peer, serving
from benchmarks.stage import Triton

NAME = "plain FastAPI"


def start(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.peers.plain_fastapi_app", str(port), triton.grpc_url]

    return serving(NAME, command, "/health", asks(), folder)


def asks() -> Asks:
    return {
        "small": HttpAsk("/identity", json_of(input=SMALL)),
        "large": HttpAsk("/identity", json_of(input=LARGE)),
        "file": HttpAsk("/file", form_of("file", FILE), FORM),
        "early exit": HttpAsk("/ocr", form_of("file", BLANK), FORM),
        "stream": _stream(count=EVENTS),
        "idle stream": _stream(count=1_000, interval_ms=IDLE_INTERVAL_MS),
    }


def _stream(**fields: int) -> HttpAsk:
    return HttpAsk("/stream", json_of(**fields), event=b"data: {", end=b"data: [DONE]")
