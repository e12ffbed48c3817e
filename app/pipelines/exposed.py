"""The models that callers can address directly by name, under ``/v2``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.domain.capacity import Capacity, capacity_of
from app.domain.errors import ModelNotReady, UnknownModel
from app.domain.model import ModelConfig, takes_traceparent
from app.domain.sequence import SequenceIds, sequence_ids_of
from app.pipelines.lookup import Lookup, Missing

_UNKNOWN = Capacity()


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The rules for requests to a model that depend on the models below it."""

    sequence_ids: SequenceIds = field(default_factory=SequenceIds)
    takes_traceparent: bool = False


class ExposedModels:
    """All exposed models and their last known configurations."""

    def __init__(self) -> None:
        self._configs: dict[str, ModelConfig | None] = {}
        self._capacities: dict[str, Capacity] = {}
        self._rules: dict[str, RequestRules] = {}
        self.in_flight: Mapping[str, int] = {}
        """Model -> the largest ``limits.in_flight`` of its pipelines. A new object if one may have changed."""
        self.idempotent: frozenset[str] = frozenset()
        """Models that may run a request twice: every pipeline over them says so."""

    @property
    def names(self) -> list[str]:
        return list(self._configs)

    @property
    def configs(self) -> list[ModelConfig]:
        """The known configurations."""
        return [config for config in self._configs.values() if config is not None]

    def __contains__(self, model: str) -> bool:
        return model in self._configs

    def config(self, model: str) -> ModelConfig:
        """Returns the same object until the configuration changes. Raises UnknownModel or ModelNotReady."""
        config = self._configs.get(model)
        if config is not None:
            return config
        if model in self._configs:
            raise ModelNotReady("The model is not loaded.")
        raise UnknownModel.named(model)

    def capacity(self, model: str) -> Capacity:
        """Returns the signature of a model with a known configuration: the same object until it changes."""
        return self._capacities.get(model, _UNKNOWN)

    def rules(self, model: str) -> RequestRules:
        """Returns the same object until it changes. Raises ModelNotReady if a step of the model is not known."""
        known = self._rules.get(model)
        if known is None:
            raise ModelNotReady("A model that this model runs is not loaded.")
        return known

    def expose(self, names: Iterable[str]) -> None:
        """Replaces the exposed models, and deletes the configurations of all others."""
        self._configs = {name: self._configs.get(name) for name in names}

    def follow(self, lookup: Lookup) -> None:
        """Updates the configurations. A model that is not ready keeps its last one; Triton reports its state."""
        for name, known in self._configs.items():
            answer = lookup.answers.get((name, ""))
            if isinstance(answer, ModelConfig) and answer != known:
                self._configs[name] = answer
            models = lookup.models_of(name)
            if not isinstance(models, Missing):
                self._learn(models[name], models)

    def _learn(self, config: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
        capacity = capacity_of(config, models)
        if self._capacities.get(config.name) != capacity:
            self._capacities[config.name] = capacity
        rules = RequestRules(sequence_ids_of(config, models), takes_traceparent(config, models))
        if self._rules.get(config.name) != rules:
            self._rules[config.name] = rules
