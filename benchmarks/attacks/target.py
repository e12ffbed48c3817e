"""The gateway under attack, with a Triton that runs no models: the gateway rejects the bodies of the attacks."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tritonclient.grpc import service_pb2 as pb

from benchmarks.servers import Peer, running_gateway
from tests.toolkit.triton import FakeTriton, serving

MODEL = "attacked"
INPUTS = {"FIXED": ("TYPE_FP32", [384]), "FREE": ("TYPE_INT64", [-1]), "TEXTS": ("TYPE_STRING", [-1])}


class _Triton(FakeTriton):
    async def ModelConfig(self, request: object, context: object) -> pb.ModelConfigResponse:  # noqa: N802 - gRPC's name
        answer = pb.ModelConfigResponse()
        answer.config.name, answer.config.backend = MODEL, "python"
        for name, (datatype, dims) in INPUTS.items():
            answer.config.input.add(name=name, data_type=datatype, dims=dims, optional=True)
        answer.config.output.add(name="Y", data_type="TYPE_FP32", dims=[1])
        return answer


@asynccontextmanager
async def attacked() -> AsyncIterator[Peer]:
    config = json.dumps({"pipelines": {MODEL: {"model": MODEL}}})
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        async with serving(_Triton(ready={MODEL: "READY"})) as triton:
            settings = {"config": config, "log_level": "error", "triton_url": triton.url}
            async with running_gateway("attacked", None, Path(folder), {}, **settings) as peer:
                yield peer


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)
