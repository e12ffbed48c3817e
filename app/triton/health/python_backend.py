"""Tracks models whose Python process (Triton calls it a stub) or engine died.

Triton 2.51 does not restart such a process. The model stays ready in Triton, and every request that reaches the process
fails after about a second. The engine of a model, such as that of an LLM backend, can die in a process that lives:
pipelines declare the messages of such a model (``engine_errors``).
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable

from app.core.model import ModelConfig
from app.triton.health.declarations import Declarations, NoDeclarations

REPEATED = 3
"""The number of errors about one process that confirms its death if the model has no sample."""
ENGINE = ""
"""In place of the name of a model with a dead process: the engine of the called model died."""
_LONGEST_MESSAGE = 4096
_DEAD_STUB = re.compile(r"Stub process (?:'([^']*)' )?is not healthy\.")
_log = logging.getLogger(__name__)


class Stubs:
    """A call that fails because of a dead process makes its model a suspect.

    An error text may contain text from a caller, so a suspect counts as dead only after :meth:`condemn`.
    """

    def __init__(
        self,
        count_death: Callable[[str], None] = lambda model: None,
        *,
        are_repaired: bool = False,
        count_engine_death: Callable[[str], None] = lambda model: None,
        declared: Declarations | None = None,
    ) -> None:
        """``are_repaired``: whether the gateway loads a model again whose process or engine died."""
        self._count_death = count_death
        self._count_engine_death = count_engine_death
        self._declared = declared or NoDeclarations()
        self.are_repaired = are_repaired
        self._configs: dict[str, ModelConfig] = {}
        self._suspects: dict[str, Counter[str]] = {}
        """Called model -> the models whose process the errors of its calls named, and ENGINE."""
        self.dead_models: set[str] = set()
        self.dead_engines: set[str] = set()
        """Those of the dead models whose engine died."""
        self._unproven: set[str] = set()
        """Models that are used again after the death of their engine, although no answer has proved that it works."""
        self._died_at: dict[str, float] = {}
        """Model -> when its last death became known, in monotonic seconds."""
        self._repaired_at: dict[str, float] = {}
        """Model -> time of its last repair, in monotonic seconds."""

    def learn(self, config: ModelConfig) -> None:
        """Stores which models this model runs."""
        self._configs[config.name] = config

    def is_alive(self, model: str) -> bool:
        """False while the process of the model, or of a model that it runs, is dead."""
        return self.dead_models.isdisjoint(self.run_by(model))

    def has_engine(self, model: str) -> bool:
        """False while the engine of the model, or of a model that it runs, is dead."""
        return not self.dead_engines or self.dead_engines.isdisjoint(self.run_by(model))

    def is_engine_error(self, called: str, message: str) -> bool:
        """Whether a pipeline declares that this message means that the engine of the called model died."""
        message = message[:_LONGEST_MESSAGE]
        return any(re.search(pattern, message) for pattern in self._declared.engine_errors(called))

    def has_died_since(self, began: float, called: str) -> bool:
        """Whether the process of the model, or of a model that it runs, is known to have died after ``began``."""
        return any(self._died_at.get(model, began) > began for model in self.run_by(called)) if self._died_at else False

    @property
    def suspects(self) -> list[str]:
        return list(self._suspects)

    @property
    def dead(self) -> list[str]:
        return sorted(self.dead_models)

    def suspect(self, called: str, message: str, began: float) -> None:
        """Notes the error of a call to the model ``called``, if it is about a process or engine that the model needs.

        ``began``: start of the call, in monotonic seconds. A call from before the repair of the model is ignored,
        because its error, which may be seconds late, is about the process that the repair replaced.
        """
        found = _DEAD_STUB.search(message)
        is_engine = found is None and self.is_engine_error(called, message)
        model = self.owner(called, message) if found and found[1] else called
        if (found or is_engine) and model is not None and began >= self._repaired_at.get(model, began):
            self._suspects.setdefault(called, Counter())[ENGINE if is_engine else model] += 1

    def answered(self, called: str) -> None:
        """Call this after a success: the engine of a model with one instance works."""
        self._unproven.discard(called)
        if ENGINE in self._suspects.get(called, ()) and self.instances(called) == 1:
            self.acquit(called)

    def owner(self, called: str, message: str) -> str | None:
        """The model of the dead process that the message names, if the model ``called`` runs it.

        For a message about an engine, the called model.
        """
        found = _DEAD_STUB.search(message)
        if found is None:
            return called if self.is_engine_error(called, message) else None
        stub = found[1] or ""
        return max((name for name in self.run_by(called) if _is_of(stub, name)), key=len, default=None)

    def repeated(self, called: str) -> str | None:
        """Returns the model that enough errors of ``called`` named, or None.

        One error is enough for an engine that died before and has not answered since.
        """
        ((model, count),) = self._suspects.get(called, Counter({called: 0})).most_common(1)
        enough = 1 if model == ENGINE and called in self._unproven else REPEATED
        return (model or called) if count >= enough else None

    def condemn(self, model: str) -> None:
        if model in self.dead_models:
            return
        self.dead_models.add(model)
        self._died_at[model] = time.monotonic()
        if ENGINE in self._suspects.get(model, ()):
            self.dead_engines.add(model)
            self._count_engine_death(model)
            _log.error("the engine of model '%s' died, although Triton reports the model as ready", model)
        else:
            self._count_death(model)
            _log.error("the Python process of model '%s' died, and Triton does not restart it", model)

    def acquit(self, called: str) -> None:
        """Clears the suspicion after a successful canary."""
        self._suspects.pop(called, None)

    def revive(self, model: str, *, is_proven: bool = True) -> None:
        """``is_proven``: whether the model has answered a sample."""
        if model in self.dead_engines and not is_proven:
            self._unproven.add(model)
        self.dead_models.discard(model)
        self.dead_engines.discard(model)
        self._repaired_at[model] = time.monotonic()
        for called in self.suspects:
            if model in self.run_by(called):
                self.acquit(called)
        _log.info("model '%s' %s", model, "works again" if is_proven else "is tried again with the next request")

    def to_load_again(self, model: str) -> list[str]:
        """The models to load again, so that a dead model works.

        The message about an engine names no model, so below an ensemble or BLS model any engine may be the dead one.
        """
        if model not in self.dead_engines:
            return [model]
        below = self.run_by(model) - {model}
        loaded = [name for name in sorted(below) if name not in self._configs or not self._configs[name].is_ensemble]
        return loaded if model in self._configs and self._configs[model].is_ensemble else [*loaded, model]

    def instances(self, called: str) -> int:
        """The largest number of instances among the models that a call of ``called`` runs."""
        configs = [self._configs[name] for name in self.run_by(called) if name in self._configs]
        return max((config.instance_count for config in configs), default=1)

    def run_by(self, model: str) -> set[str]:
        """The model itself, and the models that it runs, at any depth."""
        found: set[str] = set()
        waiting = [model]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._calls_of(name)
        return found

    def _calls_of(self, model: str) -> Iterable[str]:
        return self._configs[model].calls if model in self._configs else ()


def _is_of(stub: str, model: str) -> bool:
    """Triton names a process after its model, its instance group and its instance: ``text_embed_0_0``."""
    return stub == model or stub.startswith(f"{model}_")
