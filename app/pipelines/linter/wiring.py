"""One ensemble as its configuration wires it, faults included: who writes and who reads each of its tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from app.domain.model import ModelConfig, Step, TensorSpec

ENSEMBLE = "ensemble"

Models = Mapping[str, ModelConfig]


@dataclass(frozen=True, slots=True)
class Place:
    """A step; ``config`` is None where its model is not in the repository, or its configuration cannot be read."""

    number: int
    step: Step
    config: ModelConfig | None

    def __str__(self) -> str:
        return f"step {self.number} ('{self.step.model}')"


@dataclass(frozen=True, slots=True)
class End:
    """Where a tensor of an ensemble is written or read. ``place`` None: the ensemble's own input or output."""

    place: Place | None
    name: str
    spec: TensorSpec | None
    """None: not known, or no such tensor."""
    is_batched: bool

    def __str__(self) -> str:
        return f"{self.place}" if self.place else "the ensemble itself"


@dataclass(frozen=True, slots=True)
class Wiring:
    config: ModelConfig
    places: tuple[Place, ...]
    writers: dict[str, list[End]]
    readers: dict[str, list[End]]

    @property
    def name(self) -> str:
        return self.config.name

    def edges(self) -> Iterator[tuple[str, End, End]]:
        """Tensor, writer, reader."""
        for tensor, ends in self.writers.items():
            for writer in ends:
                yield from ((tensor, writer, reader) for reader in self.readers.get(tensor, ()))

    def runnable(self) -> list[Place]:
        """The steps that can run, in an order in which they can."""
        return [self.places[index] for index in self.config.runnable_steps(spec.name for spec in self.config.inputs)]


def wiring_of(ensemble: ModelConfig, models: Models) -> Wiring:
    places = tuple(Place(number, step, models.get(step.model)) for number, step in enumerate(ensemble.steps, 1))
    batched = ensemble.max_batch_size > 0
    writers: dict[str, list[End]] = {}
    readers: dict[str, list[End]] = {}
    for spec in ensemble.inputs:
        writers.setdefault(spec.name, []).append(End(None, spec.name, spec, batched))
    for place in places:
        for name, tensor in place.step.input_map:
            readers.setdefault(tensor, []).append(_end(place, name, ModelConfig.input))
        for name, tensor in place.step.output_map:
            writers.setdefault(tensor, []).append(_end(place, name, ModelConfig.output))
    for spec in ensemble.outputs:
        readers.setdefault(spec.name, []).append(End(None, spec.name, spec, batched))
    return Wiring(ensemble, places, writers, readers)


def is_auto_completed(config: ModelConfig) -> bool:
    """Whether Triton is left to ask the model for inputs or outputs: what they are is then not written down."""
    return config.backend != ENSEMBLE and not config.declares_tensors


def models_below(model: str, models: Models) -> Iterator[str]:
    """The model and the models that it runs, directly or through ensembles: each once, in the order of the steps."""
    waiting, seen = [model], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            yield name
            waiting += [step.model for step in reversed(models[name].steps)] if name in models else ()


def decoupled_models(models: Models) -> set[str]:
    """An ensemble is decoupled if one of its steps is. Triton says so only after it has loaded the ensemble."""
    callers: dict[str, set[str]] = {}
    for name, config in models.items():
        for step in config.steps:
            callers.setdefault(step.model, set()).add(name)
    found = {name for name, config in models.items() if config.decoupled}
    waiting = list(found)
    while waiting:
        new = callers.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _end(place: Place, name: str, spec_of: Callable[[ModelConfig, str], TensorSpec | None]) -> End:
    if place.config is None:
        return End(place, name, None, is_batched=False)
    spec = spec_of(place.config, name)
    return End(place, name, spec if spec and spec.is_typed else None, place.config.max_batch_size > 0)
