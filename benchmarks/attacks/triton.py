"""A Triton with one ready model. The model is never called, because the gateway rejects the bodies of the attacks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from benchmarks.grpc_server import running

MODEL = "attacked"
INPUTS = {"FIXED": ("TYPE_FP32", [384]), "FREE": ("TYPE_INT64", [-1]), "TEXTS": ("TYPE_STRING", [-1])}


class _Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    async def ServerLive(self, request: object, context: object) -> service_pb2.ServerLiveResponse:  # noqa: N802 - gRPC's name
        return service_pb2.ServerLiveResponse(live=True)

    async def RepositoryIndex(self, request: object, context: object) -> service_pb2.RepositoryIndexResponse:  # noqa: N802
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name=MODEL, version="1", state="READY")
        return answer

    async def ModelReady(self, request: object, context: object) -> service_pb2.ModelReadyResponse:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=True)

    async def ModelConfig(self, request: object, context: object) -> service_pb2.ModelConfigResponse:  # noqa: N802
        config = model_config_pb2.ModelConfig(name=MODEL, backend="python")
        for name, (datatype, dims) in INPUTS.items():
            config.input.add(name=name, data_type=datatype, dims=dims, optional=True)
        config.output.add(name="Y", data_type="TYPE_FP32", dims=[1])
        return service_pb2.ModelConfigResponse(config=config)


@asynccontextmanager
async def triton_without_models_to_run() -> AsyncIterator[str]:
    """Starts the server and yields its address."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Triton(), server)
    async with running(server) as url:
        yield url
