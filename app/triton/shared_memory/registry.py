"""Triton's list of registered regions, over gRPC. Every method raises RpcError or DecodeError."""

import re

from tritonclient.grpc import service_pb2

from app.triton.service import call_control
from app.triton.shared_memory.region import Region
from app.triton.transport import Transport

_TIMEOUT_S = 1.0
_COUNTS_USES = (2, 50)
"""From this version on Triton does not unmap regions that a request uses. Older versions do, and crash."""


class Registry:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def counts_uses(self) -> bool:
        """Whether it is safe to unregister a region that may be in use."""
        answer = await call_control(self._transport, service_pb2.ServerMetadataRequest(), _TIMEOUT_S)
        found = re.match(r"(\d+)\.(\d+)", answer.version)
        return found is not None and (int(found[1]), int(found[2])) >= _COUNTS_USES

    async def register(self, region: Region) -> None:
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=region.name, key=f"/{region.name}", byte_size=region.size
        )
        await call_control(self._transport, request, _TIMEOUT_S)

    async def unregister(self, name: str) -> None:
        """Unregisters a region. While a request uses it, Triton 2.50 and 2.51 refuse; newer ones unmap it later."""
        await call_control(self._transport, service_pb2.SystemSharedMemoryUnregisterRequest(name=name), _TIMEOUT_S)

    async def names(self) -> set[str]:
        """The regions that Triton maps."""
        answer = await call_control(self._transport, service_pb2.SystemSharedMemoryStatusRequest(), _TIMEOUT_S)
        return set(answer.regions)
