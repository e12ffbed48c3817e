"""The gateway's part of an explanation: the request, its pipeline's steps, and the phases that the gateway measured."""

from dataclasses import dataclass, replace

from app.core.errors import Outcome
from app.observability.explain.spans import TritonSpan


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """``name``, ``model`` and ``ensemble`` are those of the pipeline's graph."""

    name: str
    model: str
    ensemble: str
    decoupled: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a pipeline. ``next_steps``: pairs of names, a step and a step that reads one of its outputs.

    ``calls``: models that a BLS step declares to call.
    """

    pipeline: str
    model: str
    steps: tuple[ExplainedStep, ...]
    next_steps: frozenset[tuple[str, str]]
    ensembles: frozenset[str]
    calls: frozenset[str]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended. Times are in seconds; ``triton_at_s`` is None if Triton was not called."""

    status: int
    outcome: Outcome
    early_exit: str | None
    error: str | None
    failed_step: str
    """The model that the error names; empty if it names none."""
    triton_request_id: str
    total_s: float
    queue_s: float
    triton_at_s: float | None
    triton_s: float
    shared_with: int = 0
    """The number of other requests in the call to Triton."""


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """``owner``: the id of the caller's key. ``started_ns``: since the epoch. ``ended``: None while it runs."""

    request_id: str
    owner: str
    trace_id: str
    started_ns: int
    plan: Plan
    ended: Ended | None = None

    def with_end(self, ended: Ended) -> "ExplainedRequest":
        return replace(self, ended=ended)


@dataclass(frozen=True, slots=True)
class Found:
    """A request, and all spans of its trace that Triton has sent. ``dropped``: the number of spans over the limit."""

    request: ExplainedRequest
    spans: tuple[TritonSpan, ...]
    dropped: int = 0
