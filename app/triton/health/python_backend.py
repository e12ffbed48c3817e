"""Tracks models whose Python process (Triton calls it a stub) died.

Triton 2.51 does not restart such a process. The model stays ready in Triton, and every request that reaches the process
fails after about a second.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from app.core.model import ModelConfig

REPEATED = 3
"""The number of errors about one process that confirms its death if the model has no sample."""
_DEAD_STUB = re.compile(r"Stub process (?:'([^']*)' )?is not healthy\.")
_log = logging.getLogger(__name__)


class Stubs:
    """A call that fails because of a dead process makes its model a suspect.

    An error text may contain text from a caller, so a suspect counts as dead only after :meth:`condemn`.
    """

    def __init__(self, count_death: Callable[[str], None] = lambda model: None, *, are_repaired: bool = False) -> None:
        """``are_repaired``: whether the gateway loads a model again whose process died."""
        self._count_death = count_death
        self.are_repaired = are_repaired
        self._configs: dict[str, ModelConfig] = {}
        self._suspects: dict[str, Counter[str]] = {}
        """Called model -> the models whose process the errors of its calls named."""
        self.dead_models: set[str] = set()
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
        """Notes the error of a call to the model ``called``, if it is about a process that the model needs.

        ``began``: start of the call, in monotonic seconds. A call from before the repair of the model is ignored,
        because its error, which may be seconds late, is about the process that the repair replaced.
        """
        found = _DEAD_STUB.search(message)
        model = self.owner(called, message) if found and found[1] else called
        if found and model is not None and began >= self._repaired_at.get(model, began):
            self._suspects.setdefault(called, Counter())[model] += 1

    def owner(self, called: str, message: str) -> str | None:
        """The model of the dead process that the message names, if the model ``called`` runs it."""
        found = _DEAD_STUB.search(message)
        if found is None:
            return None
        stub = found[1] or ""
        return max((name for name in self.run_by(called) if _is_of(stub, name)), key=len, default=None)

    def repeated(self, called: str) -> str | None:
        """Returns the model that enough errors of ``called`` named, or None."""
        ((model, count),) = self._suspects.get(called, Counter({called: 0})).most_common(1)
        return model if count >= REPEATED else None

    def take_suspects(self) -> dict[str, dict[str, int]]:
        """Returns and forgets the current suspects. Another process confirms them."""
        suspects, self._suspects = self._suspects, {}
        return {called: dict(models) for called, models in suspects.items()}

    def add_suspects(self, suspects: Mapping[str, Mapping[str, int]]) -> None:
        """Adds the suspects that :meth:`take_suspects` returned in another process."""
        for called, models in suspects.items():
            self._suspects.setdefault(called, Counter()).update(models)

    def follow(self, dead: Iterable[str]) -> None:
        """Sets the dead models to those of the process that confirms and repairs them."""
        now, known = time.monotonic(), set(dead)
        self._repaired_at |= dict.fromkeys(self.dead_models - known, now)
        self._died_at |= dict.fromkeys(known - self.dead_models, now)
        self.dead_models = known

    def condemn(self, model: str) -> None:
        if model not in self.dead_models:
            self.dead_models.add(model)
            self._died_at[model] = time.monotonic()
            self._count_death(model)
            _log.error("the Python process of model '%s' died, and Triton does not restart it", model)

    def acquit(self, called: str) -> None:
        """Clears the suspicion after a successful canary."""
        self._suspects.pop(called, None)

    def revive(self, model: str) -> None:
        self.dead_models.discard(model)
        self._repaired_at[model] = time.monotonic()
        for called in self.suspects:
            if model in self.run_by(called):
                self.acquit(called)
        _log.info("model '%s' works again", model)

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
