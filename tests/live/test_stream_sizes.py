"""Streams of the real Triton, with responses of random sizes and readers of random pace, over both gRPC clients."""

import asyncio
import json
from contextlib import aclosing
from random import Random

import pytest

from app.core.inference import Deadline, InferenceRequest, Tensor, bytes_array
from app.launcher.embedded_triton import EmbeddedTriton
from app.triton.connect import open_transport
from app.triton.service import Kind
from app.triton.triton_engine import TritonEngine

LARGEST = 4_000_000
AT_ONCE = 8
STALL_S = 60.0
"""A stream that takes this long has stalled: it takes well under a second."""
WINDOW = [[70_000], [100, 70_000], [32_000, 50_000], [10_000, 20_000, 60_000], [32_000, 63_000, 95_000]]
"""Sizes that together are a little larger than the receive window of a stream."""


async def sizes_of(engine: TritonEngine, sizes: list[int], pauses: Random | None = None) -> list[int]:
    """Requests a stream of responses with these sizes. Returns the sizes of its responses."""
    script = json.dumps({"outputs": len(sizes), "bytes": sizes}).encode()
    request = InferenceRequest("scripted_stream", (Tensor("SCRIPT", "BYTES", bytes_array([script], (1,))),))
    found = []
    async with aclosing(engine.infer_stream(request, Deadline.after(STALL_S))) as responses:
        async for response in responses:
            if "TEXT" in response.outputs:
                found.append(len(response.outputs["TEXT"].array[0]))
            if pauses is not None:
                await asyncio.sleep(pauses.choice((0, 0, 0, 0.001, 0.01)))
    return found


@pytest.mark.parametrize("kind", ["asyncio", "grpcio"])
@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
async def test_streams_of_random_sizes(triton: EmbeddedTriton, kind: Kind, count: int) -> None:
    """Small sizes are as frequent as large sizes, from 1 byte to 4 MB."""
    left = iter(range(count))

    async def reader(engine: TritonEngine) -> None:
        for seed in left:
            random = Random(seed)
            sizes = [int(LARGEST ** random.random()) for _ in range(random.randint(1, 5))]
            assert await sizes_of(engine, sizes, random) == sizes, seed

    async with open_transport(triton.grpc_url, kind=kind) as transport, asyncio.TaskGroup() as readers:
        engine = TritonEngine(transport)
        for _ in range(AT_ONCE):
            readers.create_task(reader(engine))
