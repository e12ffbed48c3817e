"""Queries Triton about the models of the pipelines: each model once, all of them concurrently.

The models that callers can address directly by name, under ``/v2``.
"""

import asyncio
import dataclasses
import difflib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.core.engine import InferenceServer
from app.core.errors import GatewayError, ModelNotReady, UnknownModel
from app.core.model import (
    Capacity,
    ModelConfig,
    ModelKey,
    ModelState,
    capacity_of,
    reached,
    takes_traceparent,
)
from app.core.sequence import OwnIds, SequenceIds, sequence_ids_of
from app.core.text import nearest
from app.pipelines.sessions import stateful_models
from app.pipelines.spec import CancelSpec

Answer = ModelConfig | Exception

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a model is not there.

    ``detail`` is for callers. ``problem`` is for the log; it is empty while Triton does not answer, which is no fault
    of the model. ``unexpected`` is an exception that the engine does not declare.
    """

    detail: str
    problem: str = ""
    unexpected: Exception | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    is_up: bool = False
    index: Mapping[str, ModelState] = field(default_factory=dict)
    answers: Mapping[ModelKey, Answer] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    """Model -> why it is not ready although Triton has loaded it, as a clause."""

    def models_of(self, model: str, version: str = "") -> dict[str, ModelConfig] | Missing:
        """The models that a request to ``model`` runs through, ``model`` first.

        Of the models that a BLS model declares, those that are ready.
        """
        found: dict[str, ModelConfig] = {}
        waiting = [(model, version, False)]
        while waiting:
            name, wanted, may_lack = waiting.pop()
            answer = self.answers.get((name, wanted))
            if isinstance(answer, ModelConfig):
                found[name] = answer
                waiting += [(each, "", each in answer.bls_calls) for each in answer.calls if each not in found]
            elif not (may_lack and isinstance(answer, ModelNotReady)):
                return self._missing(name, wanted, "" if name == model else f", which '{model}' runs")
        return found

    def is_ready(self, key: ModelKey) -> bool:
        return isinstance(self.answers.get(key), ModelConfig)

    def _missing(self, name: str, version: str, step: str) -> Missing:
        if not self.is_up:
            return Missing("Triton does not answer.")
        answer = self.answers.get((name, version))
        if answer is None or isinstance(answer, ModelConfig):
            return Missing("Its model has not been seen yet.")  # added to the file after the query
        if isinstance(answer, ModelNotReady):
            return self._unknown(name, step) if name not in self.index else self._unloaded(name, version, step)
        if isinstance(answer, GatewayError):
            return Missing(f"Triton does not answer for model '{name}'{step}.")
        return Missing(f"The configuration of model '{name}'{step} cannot be read.", f"'{name}': {answer!r}", answer)

    def _unknown(self, name: str, step: str) -> Missing:
        near = difflib.get_close_matches(name, list(self.index), n=1)
        return Missing(
            f"Triton has no model '{name}'{step}" + (f"; did you mean '{near[0]}'?" if near else "."),
            f"'{name}'{step} is not a model in Triton's repository{nearest(name, list(self.index))}",
        )

    def _unloaded(self, name: str, version: str, step: str) -> Missing:
        state = self.index[name]
        if fault := self.faults.get(name):
            return Missing(f"Model '{name}'{step} does not work: {fault}.", f"'{name}'{step} is loaded, but {fault}")
        if state.ready and not version:
            return Missing(f"Model '{name}'{step} does not answer.", f"'{name}'{step} is loaded and does not answer")
        of_version = f"version {version} of " if version else ""
        return Missing(
            f"Triton has not loaded {of_version}model '{name}'{step}.",
            f"'{name}'{step} is not loaded{f' in version {version}' if version else ''}"
            + (f"; Triton says: {state.reason}" if state.reason else ""),
        )


async def look_up(
    engine: InferenceServer, wanted: Iterable[ModelKey], index: Mapping[str, ModelState] | None
) -> Lookup:
    """Asks a Triton that is up. ``index`` None: the repository index is read only if a model is not ready."""
    answers: dict[ModelKey, Answer] = {}
    keys = sorted(set(wanted))
    while keys:
        found = await asyncio.gather(*(_ask(engine, *key) for key in keys))
        answers |= zip(keys, found, strict=True)
        calls = {(name, "") for config in found if isinstance(config, ModelConfig) for name in config.calls}
        keys = sorted(calls - answers.keys())
    if index is None and any(isinstance(answer, ModelNotReady) for answer in answers.values()):
        index = await read_index(engine)
    unready = {name for (name, _), answer in answers.items() if isinstance(answer, ModelNotReady)}
    faults = {name: fault for name in unready if (fault := engine.fault(name))}
    return Lookup(is_up=True, index=index or {}, answers=answers, faults=faults)


async def read_index(engine: InferenceServer) -> dict[str, ModelState] | None:
    """Returns the models by name; of several versions, a ready one. None if Triton does not answer."""
    try:
        states = await engine.models()
    except GatewayError as exc:
        _log.warning("Triton's models could not be listed: %s", exc.detail)
        return None
    return {state.name: state for state in sorted(states, key=lambda state: state.ready)}


async def _ask(engine: InferenceServer, model: str, version: str) -> Answer:
    try:
        if not await engine.model_ready(model, version):
            return ModelNotReady(f"Triton has no ready model '{model}'.")
        return await engine.model_config(model, version)
    except Exception as exc:
        return exc


_UNKNOWN = Capacity()


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The rules for requests to a model that depend on the models below it, and on the pipelines over it."""

    sequence_ids: SequenceIds = field(default_factory=SequenceIds)
    takes_traceparent: bool = False
    idempotent: bool = False
    ends_by_hook: bool = False


class OipModels:
    """All exposed models and their last known configurations."""

    def __init__(self) -> None:
        self._configs: dict[str, ModelConfig | None] = {}
        self._capacities: dict[str, Capacity] = {}
        self._rules: dict[str, RequestRules] = {}
        self.in_flight: Mapping[str, int] = {}
        """Model -> the largest ``limits.in_flight`` of its pipelines. A new object if one has changed."""
        self.first_output_s: Mapping[str, float] = {}
        """Model -> the largest ``stream.first_output_s`` of its pipelines. Changes together with ``in_flight``."""
        self.idempotent: frozenset[str] = frozenset()
        """Models that may run a request twice: every pipeline over them says so."""
        self.cancel: Mapping[str, CancelSpec] = {}
        """Model -> what a pipeline over it declares: Triton would not stop a step of the model."""
        self.with_sessions: frozenset[ModelKey] = frozenset()
        """The models of the pipelines with sessions."""
        self._session_ids: dict[ModelKey, tuple[OwnIds, frozenset[str]]] = {}
        """The ids of their sequences, and the stateful models that have these sequences."""

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
        """Returns what a model can run at the same time: the same object until its configuration changes."""
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
        self._follow_sessions(lookup)
        for name, known in self._configs.items():
            answer = lookup.answers.get((name, ""))
            if isinstance(answer, ModelConfig) and answer != known:
                self._configs[name] = answer
            models = lookup.models_of(name)
            if not isinstance(models, Missing):
                self._learn(models[name], models)

    def _follow_sessions(self, lookup: Lookup) -> None:
        for key in self.with_sessions:
            models = lookup.models_of(*key)
            if not isinstance(models, Missing):
                config = models[key[0]]
                stateful = frozenset(each.name for each in stateful_models(config, models))
                self._session_ids[key] = sequence_ids_of(config, models).own, stateful

    def _sequence_ids_of(self, config: ModelConfig, models: Mapping[str, ModelConfig]) -> SequenceIds:
        known = [self._session_ids[key] for key in self.with_sessions if key in self._session_ids]
        below = {each.name for each in reached(config, models)}
        reserved = frozenset(own for own, stateful in known if stateful & below)
        return dataclasses.replace(sequence_ids_of(config, models), reserved=reserved)

    def _learn(self, config: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
        capacity = capacity_of(config, models)
        if self._capacities.get(config.name) != capacity:
            self._capacities[config.name] = capacity
        ids = self._sequence_ids_of(config, models)
        name = config.name
        rules = RequestRules(ids, takes_traceparent(config, models), name in self.idempotent, name in self.cancel)
        if self._rules.get(config.name) != rules:
            self._rules[config.name] = rules
