"""The terms of a pipeline's sessions: how long they live, and the sequences in Triton that they need."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.core.model import ModelConfig, reached
from app.core.sequence import SequenceIds, sequence_ids_of
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.spec import PipelineSpec

MARGIN = 0.1
LEAST_MARGIN_S, MOST_MARGIN_S = 0.1, 5.0
"""A request must be in Triton's queue this long before Triton forgets the sequence."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """``idle_s`` and ``max_s``: as declared. ``max_open``: None for as many as the models have slots.

    ``slots``: how many sequences each model that a step runs has at a time. ``triton_idle_s`` and ``longest_idle_s``:
    the first, and every one of them, has forgotten a sequence whose last request was queued this long ago.
    """

    slots: Mapping[str, int]
    ids: SequenceIds
    idle_s: float
    max_s: float
    triton_idle_s: float
    longest_idle_s: float
    max_open: int | None = None

    @property
    def reach_s(self) -> float:
        """The next step must be queued in Triton within this time after the last one."""
        return reach_s(self.triton_idle_s)


def reach_s(idle_s: float) -> float:
    """Triton's idle time without a margin."""
    return max(idle_s - min(max(idle_s * MARGIN, LEAST_MARGIN_S), MOST_MARGIN_S), idle_s / 2)


def stateful_models(config: ModelConfig, models: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """The models with sequences that get the id of a request. ``models``: those that a request runs through."""
    given_id = reached(config, models, by_steps=True)
    return [each for each in given_id if each.sequence is not None and not each.sequence.is_iterative]


def session_terms_of(spec: PipelineSpec, config: ModelConfig, models: Mapping[str, ModelConfig]) -> SessionTerms | None:
    """``models``: those that a request runs through, as far as they are known. None without ``session``.

    Raises PipelineMismatch with the reason if the models have no sequences of callers.
    """
    if spec.session is None:
        return None
    ids, stateful = sequence_ids_of(config, models), stateful_models(config, models)
    if not stateful and any(step.model not in models for step in config.steps):
        return None  # a step that is not known may be stateful
    refusal = ""
    if ids.made_for:
        refusal = (
            f"model '{ids.made_for}' has `iterative_sequence`, which needs no session: each request is a sequence of "
            "its own. Remove `session`"
        )
    elif not stateful:
        refusal = "no model that a request runs through has `sequence_batching`"
    elif not ids.max_number and not ids.takes_text:
        names = ", ".join(each.name for each in stateful)
        refusal = f"the models {names} take no common form of sequence id: texts and numbers"
    if refusal:
        raise PipelineMismatch(("session",), f"is on, but {refusal}")
    idle_s = [each.sequence.idle_s for each in stateful if each.sequence is not None]
    return SessionTerms(
        slots={each.name: each.sequence_slots for each in stateful},
        ids=ids,
        idle_s=spec.session.idle_s,
        max_s=spec.session.max_s,
        triton_idle_s=min(idle_s),
        longest_idle_s=max(idle_s),
        max_open=spec.session.max_open,
    )
