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


def is_decoupled(config: ModelConfig, models: Models, above: frozenset[str] = frozenset()) -> bool:
    """An ensemble is as soon as one of its steps is; Triton says so only once it has loaded it."""
    below = [models[step.model] for step in config.steps if step.model in models and step.model not in above]
    return config.decoupled or any(is_decoupled(each, models, above | {config.name}) for each in below)


def _end(place: Place, name: str, spec_of: Callable[[ModelConfig, str], TensorSpec | None]) -> End:
    if place.config is None:
        return End(place, name, None, is_batched=False)
    spec = spec_of(place.config, name)
    return End(place, name, spec if spec and spec.is_typed else None, place.config.max_batch_size > 0)
