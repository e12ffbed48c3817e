"""Checks over gRPC whether a newly started Triton is ready."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as messages

from app.triton.service import call_control
from app.triton.transport import RpcError, Transport
from app.triton.transports import open_transport

_ANSWER_TIMEOUT_S = 2.0
_LIVE_TIMEOUT_S = 5.0


class Probe:
    """Queries one server."""

    def __init__(self, url: str, transport: Transport) -> None:
        self._address = url.rsplit(":", 1)
        self._transport = transport

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator["Probe"]:
        """Opens a probe of the server at `url` for the duration of the block."""
        async with open_transport(url) as transport:
            yield cls(url, transport)

    async def is_ready(self, nonce: str) -> bool:
        """Whether the server that was started with `--id=nonce` answers and all its models are ready."""
        try:
            return await self._listens() and await self._name() == nonce and await self._has_all_models()
        except (RpcError, DecodeError):
            return False

    async def is_live(self) -> bool:
        """Whether a server answers in time that it is live."""
        try:
            answer = await call_control(self._transport, messages.ServerLiveRequest(), _LIVE_TIMEOUT_S)
        except (RpcError, DecodeError):
            return False
        return bool(answer.live)

    async def _listens(self) -> bool:
        # A gRPC client backs off after a failed attempt, so connect only when the port is open.
        try:
            _, writer = await asyncio.open_connection(*self._address)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    async def _name(self) -> str:
        answer = await call_control(self._transport, messages.ServerMetadataRequest(), _ANSWER_TIMEOUT_S)
        return str(answer.name)

    async def _has_all_models(self) -> bool:
        answer = await call_control(self._transport, messages.RepositoryIndexRequest(), _ANSWER_TIMEOUT_S)
        return all(model.state == "READY" for model in answer.models)
