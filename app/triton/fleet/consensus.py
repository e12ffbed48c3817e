"""Queries several Tritons about their models, and marks servers whose models differ.

Combines the answers of several Tritons about their models.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from app.core.engine import InferenceServer
from app.core.errors import GatewayError, ModelNotReady, UpstreamUnavailable
from app.core.model import ModelConfig, ModelKey, ModelState
from app.triton.fleet.server import TritonServer

OTHER_SIGNATURE = "other_signature"
_log = logging.getLogger(__name__)

Signature = tuple[object, ...]


def index_of(answers: Iterable[tuple[TritonServer, Sequence[ModelState]]]) -> Sequence[ModelState]:
    """Returns a row for each model and version. A model is ready if it is ready on at least one server."""
    rows: dict[tuple[str, str], ModelState] = {}
    for _, states in answers:
        for state in states:
            known = rows.get((state.name, state.version))
            if known is None or (state.ready and not known.ready):
                rows[state.name, state.version] = state
    return list(rows.values())


def signature_of(config: ModelConfig) -> Signature:
    """Returns the parts of a configuration that determine how requests are sent and responses are read."""
    return config.inputs, config.outputs, config.max_batch_size, config.decoupled


class Agreement:
    """Chooses the signature of each model if ``servers`` disagree."""

    def __init__(self, servers: Sequence[TritonServer]) -> None:
        self._servers = servers
        self._chosen: dict[ModelKey, ModelConfig] = {}

    @property
    def keys(self) -> list[ModelKey]:
        """The models whose configuration was requested."""
        return list(self._chosen)

    def compare(self, server: TritonServer, key: ModelKey, config: ModelConfig) -> None:
        """Stores the configuration of one server, and marks the server if its signature differs from the chosen one."""
        server.configs[key] = config
        _mark(server, key, is_equal=signature_of(config) == signature_of(self._chosen[key]))

    def config(self, key: ModelKey, answers: Sequence[tuple[TritonServer, ModelConfig]]) -> ModelConfig:
        """Returns the configuration that most servers have; in a tie, the signature that was chosen before.

        Its instance count is the sum over all servers with that signature, including servers that are down.
        """
        by_signature = defaultdict[Signature, list[ModelConfig]](list)
        for _, config in answers:
            by_signature[signature_of(config)].append(config)
        known = self._chosen.get(key)
        old = None if known is None else signature_of(known)
        chosen = max(by_signature, key=lambda signature: (len(by_signature[signature]), signature == old))
        self._chosen[key] = by_signature[chosen][0]
        for server, config in answers:
            self.compare(server, key, config)
        equal = [each for each in self._configs(key) if signature_of(each) == chosen]
        return replace(equal[0], instance_count=sum(config.instance_count for config in equal))

    def _configs(self, key: ModelKey) -> list[ModelConfig]:
        return [each.configs[key] for each in self._servers if key in each.configs and not each.is_leaving]


def _mark(server: TritonServer, key: ModelKey, *, is_equal: bool) -> None:
    """Marks a server that cannot be used for a model, and logs this once."""
    if is_equal:
        if server.absences.get(key) == OTHER_SIGNATURE:
            del server.absences[key]
    elif server.absences.get(key) != OTHER_SIGNATURE:
        server.absences[key] = OTHER_SIGNATURE
        text = "model '%s' at %s has other inputs or outputs than on most Tritons: it is not used there"
        _log.error(text, key[0], server.address)


T = TypeVar("T")

ANSWER_S = 3.0
"""Timeout of a query about a model."""


class Lookups:
    """``servers``: the list that the balancer keeps."""

    def __init__(self, servers: Sequence[TritonServer]) -> None:
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

    async def introduce(self, server: TritonServer) -> None:
        """Queries a server that joins or returns about the models in use. Raises GatewayError."""
        await asyncio.gather(*(_in_time(self._compare(server, key)) for key in self._agreement.keys))

    async def _compare(self, server: TritonServer, key: ModelKey) -> None:
        is_ready = await _is_ready(server.engine, key)
        server.note_readiness(key, is_ready=is_ready)
        if is_ready:
            self._agreement.compare(server, key, await server.engine.model_config(*key))

    async def _ask(self, question: Callable[[TritonServer], Awaitable[T]]) -> list[tuple[TritonServer, T]]:
        """Returns the answers of the servers that answer. If no server answers, raises the error of one of them."""
        staying = [server for server in self._servers if not server.is_leaving]
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


async def _is_ready(engine: InferenceServer, key: ModelKey) -> bool:
    try:
        return await engine.model_ready(*key)
    except ModelNotReady:
        return False
