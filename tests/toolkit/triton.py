"""A real gRPC server with Triton's API. The test provides ModelInfer and ModelStreamInfer."""

import asyncio
import logging
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

# All event loops of a process share the completion queue of grpc.aio. A loop that finds it empty logs BlockingIOError,
# and nothing is wrong: https://github.com/grpc/grpc/issues/25364
logging.getLogger("asyncio").addFilter(lambda record: "PollerCompletionQueue" not in record.getMessage())

Unary = Callable[[pb.ModelInferRequest, grpc.aio.ServicerContext], Awaitable[pb.ModelInferResponse]]
Streamed = Callable[[pb.ModelInferRequest, grpc.aio.ServicerContext], AsyncIterator[pb.ModelStreamInferResponse]]


class SharedMemory:
    """Maps regions like Triton. ``in_use`` are the regions that a request uses."""

    def __init__(self) -> None:
        self.version = "2.51.0"
        self.refusal = ""
        """If set, every registration fails with this message."""
        self.regions: dict[str, mmap.mmap] = {}
        self.in_use: set[str] = set()
        self.registered = 0
        self.unregistered: list[str] = []

    def register(self, name: str, key: str, size: int) -> None:
        with Path(f"/dev/shm{key}").open("r+b") as file:
            self.regions[name] = mmap.mmap(file.fileno(), size)
        self.registered += 1

    def bytes_of(self, tensor: pb.ModelInferRequest.InferInputTensor) -> memoryview:
        """Returns the part of a region that a tensor's parameters name. Raises KeyError for an unregistered region."""
        parameters = tensor.parameters
        start = parameters["shared_memory_offset"].int64_param
        region = self.regions[parameters["shared_memory_region"].string_param]
        return memoryview(region)[start : start + parameters["shared_memory_byte_size"].int64_param]

    def forget(self) -> None:
        """Simulates a restart of Triton."""
        self.regions.clear()
        self.in_use.clear()


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Records its requests. ``cancelled`` is set when a call ends before its script has finished."""

    unary: Unary | None = None
    streamed: Streamed | None = None
    ready: dict[str, str] = field(default_factory=dict)
    """State in the repository index by model."""
    control: list[str] = field(default_factory=list)
    """Models that were unloaded (``-m``) and loaded (``+m``), in order."""
    refuses_control: bool = False
    has_statistics: bool = True
    is_live: bool = True
    checks: int = 0
    """The number of liveness checks."""
    completed_s: dict[str, list[float]] = field(default_factory=dict)
    """The time in Triton of each completed request, by model. Only the statistics use it."""
    requests: list[pb.ModelInferRequest] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    """The metadata of the latest call."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    shared: SharedMemory = field(default_factory=SharedMemory)

    def trace_metadata(self) -> dict[str, str]:
        return {name: value for name, value in self.metadata.items() if name.startswith("trace")}

    async def ServerLive(self, request: object, context: object) -> pb.ServerLiveResponse:  # noqa: N802 - gRPC's name
        self.checks += 1
        return pb.ServerLiveResponse(live=self.is_live)

    async def RepositoryIndex(self, request: object, context: object) -> pb.RepositoryIndexResponse:  # noqa: N802
        answer = pb.RepositoryIndexResponse()
        for name, state in self.ready.items():
            answer.models.add(name=name, version="1", state=state)
        return answer

    async def ModelReady(self, request: pb.ModelReadyRequest, context: object) -> pb.ModelReadyResponse:  # noqa: N802
        return pb.ModelReadyResponse(ready=self.ready.get(request.name) == "READY")

    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelConfigResponse:
        if request.name not in self.ready:
            text = f"Request for unknown model: '{request.name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        answer = pb.ModelConfigResponse()
        answer.config.name, answer.config.backend = request.name, "python"
        return answer

    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelStatisticsResponse:
        if not self.has_statistics:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        times_s = self.completed_s.get(request.name, [])
        answer = pb.ModelStatisticsResponse()
        model = answer.model_stats.add(name=request.name, version="1", execution_count=len(times_s))
        model.inference_stats.success.count = len(times_s)
        model.inference_stats.success.ns = int(sum(times_s) * 1e9)
        model.inference_stats.fail.SetInParent()
        return answer

    async def RepositoryModelUnload(  # noqa: N802
        self, request: pb.RepositoryModelUnloadRequest, context: grpc.aio.ServicerContext
    ) -> pb.RepositoryModelUnloadResponse:
        if self.refuses_control:
            text = "explicit model load / unload is not allowed if polling is enabled"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
        self.control.append(f"-{request.model_name}")
        return pb.RepositoryModelUnloadResponse()

    async def RepositoryModelLoad(  # noqa: N802
        self, request: pb.RepositoryModelLoadRequest, context: object
    ) -> pb.RepositoryModelLoadResponse:
        self.control.append(f"+{request.model_name}")
        return pb.RepositoryModelLoadResponse()

    async def ServerMetadata(self, request: object, context: object) -> pb.ServerMetadataResponse:  # noqa: N802
        return pb.ServerMetadataResponse(version=self.shared.version)

    async def SystemSharedMemoryRegister(  # noqa: N802
        self, request: pb.SystemSharedMemoryRegisterRequest, context: grpc.aio.ServicerContext
    ) -> pb.SystemSharedMemoryRegisterResponse:
        shared = self.shared
        if shared.refusal:
            await context.abort(grpc.StatusCode.INTERNAL, shared.refusal)
        shared.register(request.name, request.key, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(  # noqa: N802
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: grpc.aio.ServicerContext
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        shared = self.shared
        shared.unregistered.append(request.name)
        if request.name in shared.in_use:
            text = f"Cannot unregister shared memory region '{request.name}', it is currently in use."
            await context.abort(grpc.StatusCode.INTERNAL, text)
        shared.regions.pop(request.name, None)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def SystemSharedMemoryStatus(  # noqa: N802
        self, request: pb.SystemSharedMemoryStatusRequest, context: object
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        for name in self.shared.regions:
            answer.regions[name].name = name
        return answer

    async def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata() or ())
        assert self.unary is not None
        try:
            return await self.unary(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        self.metadata = dict(context.invocation_metadata() or ())
        assert self.streamed is not None
        try:
            async for request in requests:
                self.requests.append(request)
                async for answer in self.streamed(request, context):
                    yield answer
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise


def piece(number: int | None = None, *, final: bool = False) -> pb.ModelStreamInferResponse:
    """Returns a response of a stream with output Y, or without outputs, and with Triton's final flag."""
    answer = pb.ModelStreamInferResponse()
    answer.infer_response.parameters["triton_final_response"].bool_param = final
    if number is not None:
        answer.infer_response.outputs.add(name="Y", datatype="INT32", shape=[1])
        answer.infer_response.raw_output_contents.append(number.to_bytes(4, "little"))
    return answer


@asynccontextmanager
async def serving(triton: FakeTriton, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[FakeTriton]:
    """Runs the server. ``credentials`` turn on TLS."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    async with _running(server, credentials) as triton.url:
        yield triton


@asynccontextmanager
async def answering(message: bytes) -> AsyncIterator[str]:
    """Yields the address of a server that answers every inference with these bytes, valid or not."""

    async def unary(request: object, context: object) -> bytes:
        return message

    async def streamed(requests: AsyncIterator[object], context: object) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield message

    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(unary),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(streamed),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    async with _running(server) as url:
        yield url


@asynccontextmanager
async def _running(server: grpc.aio.Server, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[str]:
    address = "127.0.0.1:0"
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
