"""Detects faults that Triton does not report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.domain.errors import ModelNotReady, Unavailable, UpstreamUnavailable
from app.triton.breaker import Breakers, CountOpen
from app.triton.progress import Progress, Seen
from app.triton.stubs import Stubs


@dataclass(frozen=True, slots=True)
class Observed:
    """One process's observations of a Triton since its last report, for the process that supervises that Triton."""

    seen: Seen
    suspects: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Faults:
    """The known faults of a Triton. The process that supervises the Triton sends them to the other processes."""

    dead_models: tuple[str, ...] = ()
    is_stuck: bool = False
    hung_models: tuple[str, ...] = ()


class TritonHealth:
    """Collects the results of the engine's calls, and decides what the engine reports as live and ready."""

    def __init__(self, stubs: Stubs | None = None, count_open: CountOpen = lambda model, change: None) -> None:
        self.stubs = stubs or Stubs()
        self.breakers = Breakers(count_open)
        self.progress = Progress(self.breakers)
        self.hung_models: set[str] = set()
        """Models that do not answer although Triton is live."""
        self.restart_wanted_by: set[str] = set()
        """The hung models that only a restart of Triton can help."""

    @property
    def needs_restart(self) -> bool:
        return self.progress.is_stuck or bool(self.restart_wanted_by)

    def has_working(self, model: str) -> bool:
        """Whether no known fault concerns the model, or a model that it runs."""
        if not self.stubs.dead_models and not self.hung_models:
            return True
        return (self.stubs.dead_models | self.hung_models).isdisjoint(self.stubs.run_by(model))

    def refusal(self, model: str) -> Unavailable | None:
        """Returns the error if requests to the model must not be sent to this Triton now, else None."""
        if self.hung_models and not self.hung_models.isdisjoint(self.stubs.run_by(model)):
            return ModelNotReady(f"Model '{model}' does not answer.", was_sent=False)
        if self.breakers.open and (breaker := self.breakers.open.get(model)) is not None:
            text = f"Model '{model}' failed several times in a row; it is not called until it answers a probe."
            return UpstreamUnavailable(text, was_sent=False, retry_after_s=breaker.retry_after_s)
        if self.stubs.dead_models and not self.stubs.is_alive(model):
            return ModelNotReady(f"A process that model '{model}' needs has died.", was_sent=False)
        if self.progress.is_stuck:
            return UpstreamUnavailable("Triton is stuck: it answers no inference call.", was_sent=False)
        return None

    def take(self) -> Observed:
        """Returns the observations since the last call."""
        return Observed(self.progress.take(), self.stubs.take_suspects())

    def add(self, observed: Observed) -> None:
        """Adds the observations that :meth:`take` returned in another process."""
        self.stubs.add_suspects(observed.suspects)
        self.progress.add(observed.seen)

    @property
    def faults(self) -> Faults:
        return Faults(tuple(self.stubs.dead), self.progress.is_stuck, tuple(sorted(self.hung_models)))

    def follow(self, faults: Faults) -> None:
        """Sets the faults to the :attr:`faults` of the process that supervises this Triton."""
        self.stubs.follow(faults.dead_models)
        self.progress.is_stuck = faults.is_stuck
        self.hung_models = set(faults.hung_models)


class HealthByAddress(dict[str, TritonHealth]):
    """The health of each Triton that the gateway currently calls."""

    @property
    def needs_restart(self) -> bool:
        """Whether every Triton is stuck, or has a model that answers only after a restart."""
        return bool(self) and all(health.needs_restart for health in self.values())

    def take(self) -> dict[str, Observed]:
        return {address: health.take() for address, health in self.items()}

    def add(self, observed: Mapping[str, Observed]) -> None:
        """Like the method of :class:`TritonHealth`; ignores addresses that this process does not call."""
        for address in self.keys() & observed.keys():
            self[address].add(observed[address])

    @property
    def faults(self) -> dict[str, Faults]:
        return {address: health.faults for address, health in self.items()}

    def follow(self, faults: Mapping[str, Faults]) -> None:
        """Like the method of :class:`TritonHealth`; ignores addresses that this process does not call."""
        for address in self.keys() & faults.keys():
            self[address].follow(faults[address])
