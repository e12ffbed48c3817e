"""Combines the answers of several Tritons about their models."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from app.domain.model import ModelConfig, ModelState
from app.triton.server import ModelKey, Server

OTHER_SIGNATURE = "other_signature"
_log = logging.getLogger(__name__)

Signature = tuple[object, ...]


def index_of(answers: Iterable[tuple[Server, Sequence[ModelState]]]) -> Sequence[ModelState]:
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

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._chosen: dict[ModelKey, ModelConfig] = {}

    @property
    def keys(self) -> list[ModelKey]:
        """The models whose configuration was requested."""
        return list(self._chosen)

    def compare(self, server: Server, key: ModelKey, config: ModelConfig) -> None:
        """Stores the configuration of one server, and marks the server if its signature differs from the chosen one."""
        server.configs[key] = config
        _mark(server, key, is_equal=signature_of(config) == signature_of(self._chosen[key]))

    def config(self, key: ModelKey, answers: Sequence[tuple[Server, ModelConfig]]) -> ModelConfig:
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


def _mark(server: Server, key: ModelKey, *, is_equal: bool) -> None:
    """Marks a server that cannot be used for a model, and logs this once."""
    if is_equal:
        if server.absences.get(key) == OTHER_SIGNATURE:
            del server.absences[key]
    elif server.absences.get(key) != OTHER_SIGNATURE:
        server.absences[key] = OTHER_SIGNATURE
        text = "model '%s' at %s has other inputs or outputs than on most Tritons: it is not used there"
        _log.error(text, key[0], server.address)
