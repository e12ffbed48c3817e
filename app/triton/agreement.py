"""What several Tritons say of their models, as one answer."""

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
    """A row for each model and version. It is ready if one server has it ready."""
    rows: dict[tuple[str, str], ModelState] = {}
    for _, states in answers:
        for state in states:
            known = rows.get((state.name, state.version))
            if known is None or (state.ready and not known.ready):
                rows[state.name, state.version] = state
    return list(rows.values())


def signature_of(config: ModelConfig) -> Signature:
    """What a request, and the reading of its response, depend on."""
    return config.inputs, config.outputs, config.max_batch_size, config.decoupled


class Agreement:
    """Chooses the signature of each model, among ``servers``."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._chosen: dict[ModelKey, ModelConfig] = {}

    @property
    def keys(self) -> list[ModelKey]:
        """The models that were asked about."""
        return list(self._chosen)

    def compare(self, server: Server, key: ModelKey, config: ModelConfig) -> None:
        """Notes the configuration of one server, which is marked if its signature is not the chosen one."""
        server.configs[key] = config
        _mark(server, key, is_equal=signature_of(config) == signature_of(self._chosen[key]))

    def config(self, key: ModelKey, answers: Sequence[tuple[Server, ModelConfig]]) -> ModelConfig:
        """The configuration with the signature of most servers; of equally many, that which was chosen before.

        Its instances are those of all servers with that signature, of servers that are down too.
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
    """Logs once that a server is not used for a model."""
    if is_equal:
        if server.absences.get(key) == OTHER_SIGNATURE:
            del server.absences[key]
    elif server.absences.get(key) != OTHER_SIGNATURE:
        server.absences[key] = OTHER_SIGNATURE
        text = "model '%s' at %s has other inputs or outputs than on most Tritons: it is not used there"
        _log.error(text, key[0], server.address)
