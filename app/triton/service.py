"""The methods of Triton's gRPC service. Source: Triton's ``grpc_service.proto``."""

from typing import Any

from google.protobuf.message import Message
from tritonclient.grpc import service_pb2

from app.triton.transport import Transport


def path_of(method: str) -> str:
    return f"/inference.GRPCInferenceService/{method}"


async def call_control(transport: Transport, request: Message, timeout_s: float) -> Any:
    """Calls a method other than inference, which follows from the message types. Raises RpcError or DecodeError."""
    method = type(request).__name__.removesuffix("Request")
    call = await transport.unary(path_of(method), request.SerializeToString(), timeout_s)
    return getattr(service_pb2, f"{method}Response").FromString(await call.response())
