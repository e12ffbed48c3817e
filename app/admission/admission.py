"""Admission: a request takes a slot before it calls a model, and releases it at the end (docs/reference/load.md)."""

from dataclasses import dataclass
from math import ceil

from app.admission.limit import Limit, StreamLimit, ThroughputLimit
from app.admission.scheduler import ModelQueue, PipelineAdmission, Quota
from app.core.model import Capacity


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one process in the limits. ``number``: of this process, from 1. ``of``: how many processes share."""

    number: int = 1
    of: int = 1

    def part(self, total: int) -> int:
        """All parts together are ``total``, so a part may be 0."""
        return total // self.of + (self.number <= total % self.of)


WHOLE = Share()
"""The share of a single process."""


class Admission:
    """Holds the queues of all models and the quotas of all callers.

    Args:
        own: the part of this process in the limits.
        servers: the number of Tritons at the start.
    """

    def __init__(self, own: Share = WHOLE, servers: int = 1) -> None:
        self._own = own
        self._servers = servers
        self.model_queues: dict[str, ModelQueue] = {}
        """By model: one limit protects a model, however it is called."""
        self.pipelines: dict[tuple[str, str], PipelineAdmission] = {}
        """By pipeline name and model name."""
        self._loads: dict[str, tuple[Capacity, int | None]] = {}
        """By model: what it can process at the same time, and the limit from gateway.yaml, if set."""
        self.callers: dict[str, Quota] = {}
        """Counts all requests of a caller with limits of its own, in all pipelines."""

    def of(self, name: str, model: str, capacity: Capacity, in_flight: int | None = None) -> PipelineAdmission:
        """Returns the admission for a name and a model, always the same object, and updates the model's limit.

        Call :meth:`PipelineAdmission.set_limits` after it.

        ``capacity``: of the model. ``in_flight``: its limit from gateway.yaml, if set.
        """
        model_queue = self.queue_of(model, capacity, in_flight)
        found = self.pipelines.get((name, model))
        if found is None:
            found = self.pipelines[name, model] = PipelineAdmission(name, model_queue, self.share, self.callers)
        return found

    def queue_of(self, model: str, capacity: Capacity, in_flight: int | None = None) -> ModelQueue:
        """The queue of a model, always the same object, with the limit for this capacity."""
        model_queue = self.model_queues.get(model)
        if model_queue is None or self._loads[model] != (capacity, in_flight):
            self._loads[model] = capacity, in_flight
            if in_flight is None:
                adaptive = StreamLimit if capacity.is_decoupled else ThroughputLimit
                instances, requests = self._servers * capacity.instances, self._servers * capacity.requests
                limit: Limit = adaptive(instances, requests, self._own.of)
            else:
                limit = Limit(self.share(in_flight) or 0)
            if model_queue is None:
                model_queue = self.model_queues[model] = ModelQueue(model, limit)
            model_queue.limit = limit
        return model_queue

    def share(self, total: int | None) -> int | None:
        """Returns this process's share of a limit. The shares add up to ``total``, but none is 0 unless ``total`` is.

        A process without a slot could not answer the requests on its connections.
        """
        return None if total is None else max(self._own.part(total), min(total, 1))

    def calls_of(self, model: str, steps: int) -> int:
        """Returns how many calls of a model keep it busy, if each call may have the items of several requests.

        That is one for each instance, and one more for each of the ``steps`` that a request runs through, but not
        more than the requests that may run.
        """
        instances = self._servers * self._loads[model][0].instances
        return min(self.model_queues[model].limit.value, ceil(instances / self._own.of) + steps)
