"""How many requests a model can work on at a time, as far as its configuration tells."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.domain.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of the narrowest step on a request's path through its models."""

    instances: int = 1
    """Executions at a time."""
    requests: int = 1
    """Requests in these executions, if every batch is full."""
    is_decoupled: bool = False

    def times(self, servers: int) -> "Capacity":
        """Returns the capacity of this number of servers."""
        return Capacity(servers * self.instances, servers * self.requests, self.is_decoupled)


def capacity_of(config: ModelConfig, models: Mapping[str, ModelConfig]) -> Capacity:
    """``models``: those that a request to ``config`` runs through, by name. Ensembles themselves do not compute."""
    steps = [each for each in models.values() if not each.is_ensemble] or [config]
    return Capacity(
        instances=min(each.instance_count for each in steps),
        requests=min(each.instance_count * _batch_of(each) for each in steps),
        is_decoupled=config.decoupled,
    )


def _batch_of(config: ModelConfig) -> int:
    return max(config.max_batch_size, 1) if config.joins_requests else 1
