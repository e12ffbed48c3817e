"""Whether a pipeline can have sessions, and their terms, as far as its declaration and its models tell."""

from collections.abc import Mapping

from app.core.model import ModelConfig, reached
from app.core.sequence import SequenceIds, sequence_ids_of
from app.core.session import SessionTerms, StatefulModel
from app.pipelines.mismatch import PipelineMismatch
from app.pipelines.spec import PipelineSpec


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
    refusal = _refusal(ids, [each.name for each in stateful])
    if refusal:
        raise PipelineMismatch(("session",), f"is on, but {refusal}")
    return SessionTerms(
        models=tuple(
            StatefulModel(each.name, each.sequence_slots, each.sequence.idle_s)
            for each in stateful
            if each.sequence is not None
        ),
        ids=ids,
        idle_s=spec.session.idle_s,
        max_s=spec.session.max_s,
        max_open=spec.session.max_open,
    )


def _refusal(ids: SequenceIds, stateful: list[str]) -> str:
    if ids.made_for:
        return (
            f"model '{ids.made_for}' has `iterative_sequence`, which needs no session: each request is a sequence of "
            "its own. Remove `session`"
        )
    if not stateful:
        return "no model that a request runs through has `sequence_batching`"
    if not ids.max_number and not ids.takes_text:
        return f"the models {', '.join(stateful)} take no common form of sequence id: texts and numbers"
    return ""
