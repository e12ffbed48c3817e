"""The servers in front of one Triton, and their requests.

To add one, add a line to ``PEERS``: its name and a function that starts it.
"""

import base64
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import orjson
from tritonclient.grpc.aio import InferenceServerClient

from benchmarks.contents import (
    BINARY,
    BLANK,
    EVENTS,
    FILE,
    FORM,
    IDLE_INTERVAL_MS,
    INSIGHTS,
    LARGE,
    SENTIMENTS,
    SMALL,
    TEXT,
    TOPICS,
    form_of,
    json_of,
)
from benchmarks.load.orders import GrpcAsk, HttpAsk, TensorAsk
from benchmarks.servers import (
    SHARED_MEMORY,
    Asks,
    Peer,
    Start,
    Triton,
    direct_client,
    running_gateway,
    running_server,
)
from deploy.tool_environment import tool_environment

HERE = Path(__file__).parent
GATEWAY, GATEWAY_2, GATEWAY_V2 = "this gateway", "this gateway, 2 workers", "this gateway, v2"
GATEWAY_WIRE = "this gateway, without shared memory"
PLAIN, KSERVE, TRITON = "plain FastAPI", "KServe transformer", "Triton's HTTP endpoint"
BARE, BARE_SHARED = "bare grpc.aio client", "bare grpc.aio client, tensor in shared memory"
LARGE_BODIES = {"max_body_bytes": str(32 * 2**20)}
BYTES = "application/octet-stream"
SSE = {"event": b"event: output", "end": b"event: done"}


def gateway_asks() -> dict[str, HttpAsk]:
    return {
        "small": _v1("bench_identity", json_of(input=SMALL)),
        "large": _v1("bench_identity", json_of(input=LARGE)),
        "file": _v1("bench_file", form_of("file", FILE), FORM),
        **_binary(),
        "early exit": _v1("ocr", form_of("image", BLANK), FORM),
        **{name: _v1(name, json_of(text=TEXT)) for name in INSIGHTS},
        "stream": HttpAsk("/v1/pipelines/bench_stream/stream", json_of(count=EVENTS), **SSE),
        "idle stream": HttpAsk(
            "/v1/pipelines/bench_stream/stream", json_of(count=1_000, interval_ms=IDLE_INTERVAL_MS), **SSE
        ),
    }


def _v1(pipeline: str, body: bytes, content_type: str = "application/json") -> HttpAsk:
    return HttpAsk(f"/v1/pipelines/{pipeline}", body, content_type)


def _binary() -> dict[str, HttpAsk]:
    return {name: _v1("bench_file", file, BYTES) for name, file in BINARY.items()}


def v2_asks() -> dict[str, HttpAsk]:
    """Only those that differ from requests to ``/v1``: small ones cost the same."""
    return {name: ask for name, ask in triton_asks().items() if name == "large" or name in BINARY}


def triton_asks() -> dict[str, HttpAsk]:
    return {
        "small": _numbers(SMALL),
        "large": _numbers(LARGE),
        "file": _tensor_file("bench_file", "FILE", [1], FILE),
        **{name: _tensor_file("bench_file", "FILE", [1], file) for name, file in BINARY.items()},
        "early exit": _tensor_file("ocr_ensemble", "IMAGE", [1, 1], BLANK, status=400),
        "stream": HttpAsk(
            "/v2/models/bench_stream/generate_stream", json_of(COUNT=EVENTS), event=b"data: ", end=b"\r\n0\r\n\r\n"
        ),
    }


def _numbers(numbers: np.ndarray) -> HttpAsk:
    """Returns JSON of the Open Inference Protocol, which a KServe transformer accepts too."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [len(numbers)], "data": numbers}
    return HttpAsk("/v2/models/bench_identity/infer", json_of(inputs=[tensor]))


def _tensor_file(model: str, tensor: str, shape: list[int], file: bytes, status: int = 200) -> HttpAsk:
    """Returns a file as a binary tensor after the JSON, as NVIDIA's clients send it."""
    raw = len(file).to_bytes(4, "little") + file
    described = {"name": tensor, "datatype": "BYTES", "shape": shape, "parameters": {"binary_data_size": len(raw)}}
    head = orjson.dumps({"inputs": [described]})
    headers = (("Inference-Header-Content-Length", str(len(head))),)
    return HttpAsk(f"/v2/models/{model}/infer", head + raw, BYTES, headers, status)


def grpc_asks() -> dict[str, GrpcAsk]:
    files = {"file": FILE, **BINARY}
    insights = tuple(
        bytes_ask(name, (1, len(texts)), [each.encode() for each in texts])
        for name, texts in (("TEXT", [TEXT]), ("TOPICS", TOPICS), ("SENTIMENTS", SENTIMENTS))
    )
    return {
        "small": GrpcAsk("bench_identity", (_floats(SMALL),)),
        "large": GrpcAsk("bench_identity", (_floats(LARGE),)),
        **{name: GrpcAsk("bench_file", (bytes_ask("FILE", (1,), [file]),)) for name, file in files.items()},
        "early exit": GrpcAsk("ocr_ensemble", (bytes_ask("IMAGE", (1, 1), [BLANK]),), error="ALREADY_EXISTS"),
        **{name: GrpcAsk(name, insights) for name in INSIGHTS},
        "stream": GrpcAsk("bench_stream", (_count(EVENTS),)),
        "idle stream": GrpcAsk("bench_stream", (_count(1_000),), parameters=(("interval_ms", IDLE_INTERVAL_MS),)),
    }


def _floats(values: np.ndarray) -> TensorAsk:
    return TensorAsk("INPUT", "FP32", values.shape, values.tobytes())


def _count(events: int) -> TensorAsk:
    return TensorAsk("COUNT", "INT32", (1,), np.array([events], np.int32).tobytes())


def bytes_ask(name: str, shape: tuple[int, ...], values: Sequence[bytes]) -> TensorAsk:
    return TensorAsk(name, "BYTES", shape, b"".join(len(value).to_bytes(4, "little") + value for value in values))


def plain_asks() -> dict[str, HttpAsk]:
    events = {"event": b"data: {", "end": b"data: [DONE]"}
    return {
        "small": HttpAsk("/identity", json_of(input=SMALL)),
        "large": HttpAsk("/identity", json_of(input=LARGE)),
        "file": HttpAsk("/file", form_of("file", FILE), FORM),
        "early exit": HttpAsk("/ocr", form_of("file", BLANK), FORM),
        "stream": HttpAsk("/stream", json_of(count=EVENTS), **events),
        "idle stream": HttpAsk("/stream", json_of(count=1_000, interval_ms=IDLE_INTERVAL_MS), **events),
    }


def kserve_asks() -> dict[str, HttpAsk]:
    """The image is base64 in KServe's first protocol, as KServe's documentation sends one."""
    image = {"image": {"b64": base64.b64encode(FILE).decode()}}
    file = HttpAsk("/v1/models/bench_file:predict", json_of(instances=[image]))
    return {"small": _numbers(SMALL), "large": _numbers(LARGE), "file": file}


def plain_fastapi(triton: Triton, folder: Path, asks: Asks | None = None) -> AbstractAsyncContextManager[Peer]:
    """A simple application with FastAPI, pydantic and tritonclient.grpc.aio."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.peers.plain_fastapi_app", str(port), triton.grpc_url]

    return running_server(PLAIN, command, "/health", asks or plain_asks(), folder)


def kserve_transformer(triton: Triton, folder: Path) -> AbstractAsyncContextManager[Peer]:
    """KServe's defaults and gRPC to Triton, in a separate environment."""

    def command(port: int) -> list[str]:
        app = [str(tool_environment("kserve") / "python3"), str(HERE / "kserve_app.py")]
        address = ["--http_port", str(port), "--enable_grpc", "false"]
        return [*app, *address, "--predictor_protocol", "grpc-v2", "--predictor_host", triton.grpc_url]

    return running_server(KSERVE, command, "/v2/models/bench_identity/ready", kserve_asks(), folder)


@asynccontextmanager
async def bare_shared_memory(triton: Triton, folder: Path) -> AsyncIterator[Peer]:
    """The lower bound for a binary body: its tensor is in Triton's shared memory before the call.

    No gateway that calls Triton over gRPC can be faster: it still has to receive the body.
    """
    async with AsyncExitStack() as stack:
        asks = {}
        for name, file in BINARY.items():
            tensor = bytes_ask("FILE", (1,), [file])
            region = await stack.enter_async_context(_registered(triton, tensor))
            asks[name] = GrpcAsk("bench_file", (replace(tensor, region=region),))
        yield await stack.enter_async_context(direct_client(BARE_SHARED, "grpc", triton, folder, asks))


@asynccontextmanager
async def _registered(triton: Triton, tensor: TensorAsk) -> AsyncIterator[str]:
    """Creates a region with the tensor and yields its name."""
    size = len(tensor.raw)
    async with InferenceServerClient(triton.grpc_url) as client:
        with closing(SharedMemory(create=True, size=size)) as memory:
            try:
                memory.buf[:size] = tensor.raw
                await client.register_system_shared_memory(memory.name, f"/{memory.name}", size)
            finally:
                memory.unlink()
            yield memory.name
            await client.unregister_system_shared_memory(memory.name)


PEERS: dict[str, Start] = {
    GATEWAY: partial(running_gateway, GATEWAY, asks=gateway_asks(), **LARGE_BODIES, **SHARED_MEMORY),
    GATEWAY_2: partial(running_gateway, GATEWAY_2, asks={"small": gateway_asks()["small"]}, workers="2"),
    GATEWAY_V2: partial(running_gateway, GATEWAY_V2, asks=v2_asks(), **LARGE_BODIES, **SHARED_MEMORY),
    GATEWAY_WIRE: partial(running_gateway, GATEWAY_WIRE, asks=_binary(), **LARGE_BODIES),
    PLAIN: plain_fastapi,
    KSERVE: kserve_transformer,
    TRITON: partial(direct_client, TRITON, "http", asks=triton_asks()),
    BARE: partial(direct_client, BARE, "grpc", asks=grpc_asks()),
    BARE_SHARED: bare_shared_memory,
}
"""In the order of tables and charts."""
STREAMING = (GATEWAY, PLAIN, BARE)
"""The servers whose idle streams are measured."""
