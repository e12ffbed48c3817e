"""Triton's own HTTP endpoint, in C++, without a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from benchmarks.load.orders import HttpAsk
from benchmarks.load.process import load_process
from benchmarks.peers.contents import BINARY, BLANK, EVENTS, FILE, LARGE, SMALL, json_of
from benchmarks.peers.peer import Asks, Peer
from benchmarks.stage import Triton

NAME = "Triton's HTTP endpoint"


@asynccontextmanager
async def start(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    async with load_process("http", urlsplit(triton.http_url).netloc, folder) as load:
        yield Peer(NAME, triton.pid, load, asks())


def asks() -> Asks:
    return {
        "small": numbers_ask(SMALL),
        "large": numbers_ask(LARGE),
        "file": _file_ask("bench_file", "FILE", [1], FILE),
        **{name: _file_ask("bench_file", "FILE", [1], file) for name, file in BINARY.items()},
        "early exit": _file_ask("ocr_ensemble", "IMAGE", [1, 1], BLANK, status=400),
        "stream": HttpAsk(
            "/v2/models/bench_stream/generate_stream", json_of(COUNT=EVENTS), event=b"data: ", end=b"\r\n0\r\n\r\n"
        ),
    }


def numbers_ask(numbers: object) -> HttpAsk:
    """Returns JSON of the Open Inference Protocol, which a KServe transformer accepts too."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [len(numbers)], "data": numbers}
    return HttpAsk("/v2/models/bench_identity/infer", json_of(inputs=[tensor]))


def _file_ask(model: str, tensor: str, shape: list[int], file: bytes, status: int = 200) -> HttpAsk:
    """Returns a file as a binary tensor after the JSON, as NVIDIA's clients send it."""
    raw = len(file).to_bytes(4, "little") + file
    described = {"name": tensor, "datatype": "BYTES", "shape": shape, "parameters": {"binary_data_size": len(raw)}}
    head = orjson.dumps({"inputs": [described]})
    headers = (("Inference-Header-Content-Length", str(len(head))),)
    return HttpAsk(f"/v2/models/{model}/infer", head + raw, "application/octet-stream", headers, status)
