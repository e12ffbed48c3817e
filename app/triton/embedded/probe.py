"""Asks a Triton that was just started, over gRPC, whether it is ready."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app.triton.channel import open_channel

_ANSWER_TIMEOUT_S = 2.0


class Probe:
    """Asks one server."""

    def __init__(self, url: str, channel: grpc.aio.Channel) -> None:
        self._address = url.rsplit(":", 1)
        self._stub = GRPCInferenceServiceStub(channel)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator["Probe"]:
        """A probe of the server at `url` for the duration of the block."""
        async with open_channel(url) as channel:
            yield cls(url, channel)

    async def is_ready(self, nonce: str) -> bool:
        """True when the server that was started with `--id=nonce` answers and all of its models are ready."""
        try:
            return await self._listens() and await self._name() == nonce and await self._has_all_models()
        except grpc.aio.AioRpcError:
            return False

    async def _listens(self) -> bool:
        # gRPC backs off between its attempts to connect, so the gateway connects only when the port is open.
        try:
            _, writer = await asyncio.open_connection(*self._address)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    async def _name(self) -> str:
        answer = await self._stub.ServerMetadata(messages.ServerMetadataRequest(), timeout=_ANSWER_TIMEOUT_S)
        return str(answer.name)

    async def _has_all_models(self) -> bool:
        answer = await self._stub.RepositoryIndex(messages.RepositoryIndexRequest(), timeout=_ANSWER_TIMEOUT_S)
        return all(model.state == "READY" for model in answer.models)
