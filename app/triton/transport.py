"""The methods of Triton's gRPC service, called through any gRPC client. Source: Triton's ``grpc_service.proto``."""

from typing import Any, Literal

from google.protobuf.message import Message
from tritonclient.grpc import service_pb2

from app.grpc.rpc import Transport

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
