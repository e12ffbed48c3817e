"""The terms of a pipeline's sessions: how long they live, and the sequences in Triton that they need."""

from dataclasses import dataclass
from functools import cached_property

from app.core.sequence import SequenceIds

MARGIN = 0.1
LEAST_MARGIN_S, MOST_MARGIN_S = 0.1, 5.0
"""A request must be in Triton's queue this long before Triton forgets the sequence."""


@dataclass(frozen=True, slots=True)
class StatefulModel:
    """A model with ``sequence_batching`` that each step of a session runs.

    ``slots``: how many of its sequences run at a time. ``idle_s``: Triton forgets a sequence whose last request was
    queued this long ago.
    """

    name: str
    slots: int
    idle_s: float


@dataclass(frozen=True)
class SessionTerms:
    """``idle_s`` and ``max_s``: as declared. ``max_open``: None for as many as the models have slots."""

    models: tuple[StatefulModel, ...]
    ids: SequenceIds
    idle_s: float
    max_s: float
    max_open: int | None = None

    @cached_property
    def triton_idle_s(self) -> float:
        """The time after which the first of the models forgets a sequence."""
        return min(model.idle_s for model in self.models)

    @cached_property
    def longest_idle_s(self) -> float:
        """The time after which every model has forgotten a sequence."""
        return max(model.idle_s for model in self.models)

    @cached_property
    def reach_s(self) -> float:
        """The next step must be queued in Triton within this time after the last one."""
        return reach_s(self.triton_idle_s)


def reach_s(idle_s: float) -> float:
    """Triton's idle time without a margin."""
    return max(idle_s - min(max(idle_s * MARGIN, LEAST_MARGIN_S), MOST_MARGIN_S), idle_s / 2)
