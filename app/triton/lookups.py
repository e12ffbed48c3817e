"""Queries several Tritons about their models, and marks servers whose models differ."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from app.domain.engine import Engine
from app.domain.errors import GatewayError, ModelNotReady, UpstreamUnavailable
from app.domain.model import ModelConfig, ModelState
from app.triton.agreement import Agreement, index_of
from app.triton.server import ModelKey, Server

T = TypeVar("T")

ANSWER_S = 3.0
"""Timeout of a query about a model."""


class Lookups:
    """``servers``: the list that the balancer keeps."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._agreement = Agreement(servers)

    async def models(self) -> Sequence[ModelState]:
        """Returns the models of all servers. A model is ready if it is ready on at least one server."""
        return index_of(await self._ask(lambda server: server.engine.models()))

    async def is_ready(self, key: ModelKey) -> bool:
        """Whether the model is ready on any server."""
        answers = await self._ask(lambda server: _is_ready(server.engine, key))
        for server, is_ready in answers:
            server.note_readiness(key, is_ready=is_ready)
        return any(is_ready for _, is_ready in answers)

    async def config(self, key: ModelKey) -> ModelConfig:
        """Returns the configuration of a model. A server with a different signature than most is not used for it."""
        return self._agreement.config(key, await self._ask(lambda server: server.engine.model_config(*key)))

    async def introduce(self, server: Server) -> None:
        """Queries a server that joins or returns about the models in use. Raises GatewayError."""
        await asyncio.gather(*(_in_time(self._compare(server, key)) for key in self._agreement.keys))

    async def _compare(self, server: Server, key: ModelKey) -> None:
        is_ready = await _is_ready(server.engine, key)
        server.note_readiness(key, is_ready=is_ready)
        if is_ready:
            self._agreement.compare(server, key, await server.engine.model_config(*key))

    async def _ask(self, question: Callable[[Server], Awaitable[T]]) -> list[tuple[Server, T]]:
        """Returns the answers of the servers that answer. If no server answers, raises the error of one of them."""
        staying = [server for server in self._servers if not server.is_leaving]
        asked = [server for server in staying if server.is_up] or staying
        results = await asyncio.gather(*(_in_time(question(server)) for server in asked), return_exceptions=True)
        answers = [(asked[i], result) for i, result in enumerate(results) if not isinstance(result, BaseException)]
        for result in results:
            if isinstance(result, BaseException) and (not answers or not isinstance(result, GatewayError)):
                raise result
        if not answers:
            raise no_address()
        return answers


def no_address() -> UpstreamUnavailable:
    return UpstreamUnavailable("No address of Triton is known.", was_sent=False)


async def _in_time(answer: Awaitable[T]) -> T:
    """Raises UpstreamUnavailable if a server does not answer a query in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError as exc:
        raise UpstreamUnavailable("A Triton does not answer.") from exc


async def _is_ready(engine: Engine, key: ModelKey) -> bool:
    try:
        return await engine.model_ready(*key)
    except ModelNotReady:
        return False
