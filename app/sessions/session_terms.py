"""The key ``session`` of gateway.yaml, and the terms of a pipeline's sessions: the sequences that its models have."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from app.config.document import JsonValue, Name, Seconds, Section
from app.core.engine import PipelineLayer
from app.core.inference import BYTES
from app.core.model import ModelConfig, OwnIds, SequenceBatching, SequenceIds, reached, sequence_ids_of

OWN_TEXT = "triton-gateway-session-"
OWN_NUMBERS = range(2**62, 2**63)
OWN_SHORT_NUMBERS = range(2**30, 2**31)
"""The sequence ids of sessions. The short ones are for models whose control has 32 bits."""
MARGIN = 0.1
LEAST_MARGIN_S, MOST_MARGIN_S = 0.1, 5.0
"""A request must be in Triton's queue this long before Triton forgets the sequence."""


class SessionSpec(Section):
    """A caller's steps are one sequence of a model with ``sequence_batching``."""

    idle_s: Seconds = 30.0
    """How long a session waits for its next step. Triton's own limit of the model may be shorter."""
    max_s: Seconds = 600.0
    """How long a session may live."""
    max_open: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """The most sessions at a time. Left out: as many sequences as the models run at a time."""
    end_inputs: dict[Name, JsonValue] | None = None
    """The fields of a request with which the gateway ends the sequence of a session that has no last step."""

    def terms_of(self, config: ModelConfig, models: Mapping[str, ModelConfig]) -> "SessionTerms | str | None":
        """``models``: those that a request runs through, as far as they are known.

        A text is the reason why the models cannot have sessions. None: a step that is not known may be stateful.
        """
        ids, stateful = sequence_ids_of(config, models), stateful_models(config, models)
        if not stateful and any(step.model not in models for step in config.steps):
            return None
        if ids.made_for:
            return (
                f"model '{ids.made_for}' has `iterative_sequence`, which needs no session: each request is a sequence "
                "of its own. Remove `session`"
            )
        if not stateful:
            return "no model that a request runs through has `sequence_batching`"
        if not ids.max_number and not ids.takes_text:
            names = ", ".join(each.name for each in stateful)
            return f"the models {names} take no common form of sequence id: texts and numbers"
        idle_s = [each.sequence.idle_s for each in stateful if each.sequence is not None]
        slots = {each.name: each.sequence_slots for each in stateful}
        return SessionTerms(self, slots, ids, min(idle_s), max(idle_s))

    def findings(
        self,
        pipeline: str | None,
        config: ModelConfig,
        models: Mapping[str, ModelConfig],
        *,
        limits: Mapping[str, float],
        may_exit: bool,
    ) -> Iterator[tuple[str, str]]:
        """Code and text of each finding. ``limits``: declared times by key. ``may_exit``: whether it exits early."""
        stateful, start = stateful_models(config, models), f"pipeline '{pipeline}': "
        for model in stateful:
            sequence = model.sequence or SequenceBatching()
            name, longest_s = f"'{model.name}'", reach_s(sequence.idle_s)
            declared = {"session.idle_s": self.idle_s, **limits}
            longer = " and ".join(f"`{key}` is {value:g} s" for key, value in declared.items() if value > longest_s)
            if longer:
                yield (
                    "session-idle",
                    f"{start}{longer}, but Triton forgets a sequence of {name} {sequence.idle_s:g} s after its last "
                    f"request was queued: a step and the pause after it end after {longest_s:g} s",
                )
            if self.max_open is not None and self.max_open > model.sequence_slots:
                yield (
                    "session-places",
                    f"{start}`session.max_open` is {self.max_open}, but {name} runs {model.sequence_slots} sequences "
                    "at a time: no more sessions are opened",
                )
            if not sequence.knows_starts:
                text = f"{name} has no CONTROL_SEQUENCE_START and no `state`: it cannot tell where a sequence begins"
                yield "session-state", start + text
            if sequence.id_datatype == BYTES and not sequence.candidates and model.max_batch_size > 1:
                yield (
                    "session-state",
                    f"{start}{name} gets its sequence id as a text, with the direct scheduler and max_batch_size "
                    f"{model.max_batch_size}: Triton 2.51 then fails steps while another session pauses",
                )
        run = reached(config, models, by_steps=True)
        if len(stateful) > 1 and (may_exit or any(not each.steps and each not in stateful for each in run)):
            names = ", ".join(f"'{model.name}'" for model in stateful)
            yield (
                "session-state",
                f"{start}a step runs the stateful models {names} and others: if a model fails or exits early between "
                "them, one has seen a step that the next one has not",
            )


def missing_fault(config: ModelConfig, models: Mapping[str, ModelConfig]) -> Iterator[tuple[str, str]]:
    """The finding about a model that needs a session, of a pipeline without."""
    ids = sequence_ids_of(config, models)
    if ids.needed_by:
        by = "" if ids.needed_by == config.name else f" because it runs '{ids.needed_by}'"
        yield (
            "needs-session",
            f"'{config.name}' needs a session{by}: declare `session: true`, or call it under /v2 with the "
            f"parameters `sequence_id` ({ids.form}), `sequence_start` and `sequence_end`",
        )


@dataclass(frozen=True, slots=True)
class SessionTerms(PipelineLayer):
    """What is declared, and what the models have.

    ``slots``: how many sequences each model that a step runs has at a time. ``triton_idle_s`` and ``longest_idle_s``:
    the first, and every one of them, has forgotten a sequence whose last request was queued this long ago.
    """

    spec: SessionSpec
    slots: Mapping[str, int]
    ids: SequenceIds
    triton_idle_s: float
    longest_idle_s: float

    @property
    def requests(self) -> Mapping[tuple[str, ...], Mapping[str, Any]]:
        return {} if self.spec.end_inputs is None else {("session", "end_inputs"): self.spec.end_inputs}

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


def own_ids_of(ids: SequenceIds) -> OwnIds:
    """The sequence ids from which sessions of these models get theirs."""
    if ids.is_text_tensor:
        return OWN_TEXT
    return OWN_NUMBERS if ids.max_number >= OWN_NUMBERS[-1] else OWN_SHORT_NUMBERS
