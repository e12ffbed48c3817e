"""Admission: a request takes a slot before it calls a model, and releases it at the end (docs/reference/load.md)."""

from dataclasses import dataclass
from math import ceil

from app.admission.keys import ANYONE, NO_OWN_LIMITS, Caller
from app.admission.limit import Limit, StreamLimit, ThroughputLimit
from app.admission.scheduler import Claim, ModelQueue, Quota
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
"""Of the only process."""
QUEUE = 256
"""Default limit on the requests that wait for a pipeline at the same time."""


class PipelineAdmission:
    """Admits the requests of one pipeline, or of a model called by its own name, to the queue of the model."""

    def __init__(self, admission: "Admission", name: str, model_queue: ModelQueue) -> None:
        self.name = name
        self.model_queue = model_queue
        self.own = Quota()
        self.per_key: int | None = None
        self._admission = admission
        self._by_key: dict[str, Quota] = {}
        self._claims: dict[str, tuple[Caller, Claim]] = {}
        self._anyone = Claim(model_queue, (self.own,))
        self.set_limits()

    def set_limits(self, in_flight: int | None = None, queue: int | None = None, per_key: int | None = None) -> None:
        """``in_flight`` and ``queue``: of all callers. ``per_key``: the requests of one key that run."""
        self.per_key, share = per_key, self._admission.share
        self.own.set_limits(share(in_flight), share(QUEUE if queue is None else queue))
        self._claims.clear()
        for quota in self._by_key.values():
            quota.set_limits(share(per_key), None)
        self.model_queue.serve_queue()

    def claim_of(self, caller: Caller) -> Claim:
        """Returns the same object until a limit changes."""
        if caller is ANYONE and self.per_key is None:
            return self._anyone
        known = self._claims.get(caller.id)
        if known is None or known[0] is not caller:
            quotas, admission = [self.own], self._admission
            if caller.limits != NO_OWN_LIMITS:
                of_caller = admission.callers.setdefault(caller.id, Quota(of_key=True))
                of_caller.set_limits(admission.share(caller.limits.in_flight), admission.share(caller.limits.queue))
                quotas.append(of_caller)
            if self.per_key is not None:
                of_key = self._by_key.setdefault(caller.id, Quota(of_key=True))
                of_key.set_limits(admission.share(self.per_key), None)
                quotas.append(of_key)
            claim = Claim(self.model_queue, tuple(quotas), caller.id, caller.priority)
            known = self._claims[caller.id] = caller, claim
        return known[1]


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
        found = self.pipelines.get((name, model))
        if found is None:
            found = self.pipelines[name, model] = PipelineAdmission(self, name, model_queue)
        return found

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
