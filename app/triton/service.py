"""The methods of Triton's gRPC service, called through any gRPC client. Source: Triton's ``grpc_service.proto``."""

import re
from typing import Any, Literal

from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from app.grpc.rpc import RpcError, Transport
from app.shared_memory.leases import RegistryFailed

Kind = Literal["asyncio", "grpcio"]

DEFAULT_KIND: Kind = "asyncio"
"""The gateway's own client; grpcio's is the reference."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Size limit of each request and response, so that no model can fill the gateway's memory with one message."""


def path_of(method: str) -> str:
    return f"/inference.GRPCInferenceService/{method}"


async def call_control(transport: Transport, request: Message, timeout_s: float) -> Any:
    """Calls a method other than inference, which follows from the message types. Raises RpcError or DecodeError."""
    method = type(request).__name__.removesuffix("Request")
    call = await transport.unary(path_of(method), request.SerializeToString(), timeout_s)
    try:
        return getattr(service_pb2, f"{method}Response").FromString(await call.response())
    finally:
        call.cancel()


_REGISTRY_TIMEOUT_S = 1.0
_COUNTS_USES = (2, 50)
"""From this version on Triton does not unmap regions that a request uses. Older versions do, and crash."""


class RegisteredRegions:
    """Implements :class:`app.shared_memory.leases.Registry` for the Triton of a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def counts_uses(self) -> bool:
        answer = await self._call(service_pb2.ServerMetadataRequest())
        found = re.match(r"(\d+)\.(\d+)", answer.version)
        return found is not None and (int(found[1]), int(found[2])) >= _COUNTS_USES

    async def register(self, name: str, size: int) -> None:
        await self._call(service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=size))

    async def unregister(self, name: str) -> None:
        """While a request uses the region, Triton 2.50 and 2.51 refuse; newer ones unmap it later."""
        await self._call(service_pb2.SystemSharedMemoryUnregisterRequest(name=name))

    async def names(self) -> set[str]:
        return set((await self._call(service_pb2.SystemSharedMemoryStatusRequest())).regions)

    async def _call(self, request: Message) -> Any:
        try:
            return await call_control(self._transport, request, _REGISTRY_TIMEOUT_S)
        except (RpcError, DecodeError) as exc:
            raise RegistryFailed(str(exc)) from exc
