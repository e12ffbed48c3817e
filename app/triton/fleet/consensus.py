"""Combines the answers of several Tritons about their models, and marks servers whose models differ."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from app.core.engine import InferenceServer
from app.core.errors import GatewayError, ModelNotReady, UpstreamUnavailable
from app.core.model import ModelConfig, ModelKey, ModelState
from app.triton.fleet.member import TritonServer

OTHER_SIGNATURE = "other_signature"
ANSWER_S = 3.0
"""Timeout of a query about a model."""
_log = logging.getLogger(__name__)
T = TypeVar("T")
Signature = tuple[object, ...]


def signature_of(config: ModelConfig) -> Signature:
    """Returns the parts of a configuration that determine how requests are sent and responses are read."""
    return config.inputs, config.outputs, config.max_batch_size, config.decoupled


class SeveralServers(InferenceServer):
    """Answers of several Tritons about their models, as those of one."""

    def __init__(self) -> None:
        self.servers: list[TritonServer] = []
        self._chosen: dict[ModelKey, Signature] = {}
        """Of each model whose configuration was requested."""

    async def models(self) -> Sequence[ModelState]:
        """Returns the models of all servers. A model is ready if it is ready on at least one server."""
        answers = await self._ask(lambda server: server.engine.models())
        rows: dict[tuple[str, str], ModelState] = {}
        for state in (state for _, states in answers for state in states):
            key = state.name, state.version
            if key not in rows or (state.ready and not rows[key].ready):
                rows[key] = state
        return list(rows.values())

    async def model_ready(self, model: str, version: str = "") -> bool:
        """Whether the model is ready on any server."""
        answers = await self._ask(lambda server: self._note_readiness(server, (model, version)))
        return any(is_ready for _, is_ready in answers)

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        """Returns the configuration that most servers have; in a tie, the signature that was chosen before.

        A server with another signature is not used for the model. The instance count is the sum over all servers with
        the signature, including servers that are down.
        """
        key, by_signature = (model, version), defaultdict[Signature, list[ModelConfig]](list)
        for server, config in await self._ask(lambda server: server.engine.model_config(*key)):
            server.configs[key] = config
            by_signature[signature_of(config)].append(config)
        known = self._chosen.get(key)
        chosen = max(by_signature, key=lambda signature: (len(by_signature[signature]), signature == known))
        self._chosen[key] = chosen
        staying = [server for server in self.servers if key in server.configs and not server.is_leaving]
        equal = [server.configs[key] for server in staying if self._has_chosen(server, key)] or by_signature[chosen]
        return replace(equal[0], instance_count=sum(config.instance_count for config in equal))

    async def introduce(self, server: TritonServer) -> None:
        """Queries a server that joins or returns about the models in use. Raises GatewayError."""

        async def ask(key: ModelKey) -> None:
            if await self._note_readiness(server, key):
                server.configs[key] = await server.engine.model_config(*key)
                self._has_chosen(server, key)

        await asyncio.gather(*(_in_time(ask(key)) for key in self._chosen))

    def _has_chosen(self, server: TritonServer, key: ModelKey) -> bool:
        """Whether a server has the chosen signature. Otherwise marks it, and logs this once."""
        has_chosen = signature_of(server.configs[key]) == self._chosen[key]
        is_marked = server.absences.get(key) == OTHER_SIGNATURE
        if has_chosen and is_marked:
            del server.absences[key]
        elif not has_chosen and not is_marked:
            server.absences[key] = OTHER_SIGNATURE
            text = "model '%s' at %s has other inputs or outputs than on most Tritons: it is not used there"
            _log.error(text, key[0], server.address)
        return has_chosen

    async def _note_readiness(self, server: TritonServer, key: ModelKey) -> bool:
        try:
            is_ready = await server.engine.model_ready(*key)
        except ModelNotReady:
            is_ready = False
        server.note_readiness(key, is_ready=is_ready)
        return is_ready

    async def _ask(self, question: Callable[[TritonServer], Awaitable[T]]) -> list[tuple[TritonServer, T]]:
        """Returns the answers of the servers that answer. If no server answers, raises the error of one of them."""
        staying = [server for server in self.servers if not server.is_leaving]
        servers = [server for server in staying if server.is_up] or staying
        results = await asyncio.gather(*(_in_time(question(server)) for server in servers), return_exceptions=True)
        answers = [(servers[i], result) for i, result in enumerate(results) if not isinstance(result, BaseException)]
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
