"""Checks of models with ``sequence_batching``, and of the sessions of pipelines over them."""

from collections.abc import Iterable, Iterator, Sequence

from app.core.inference import BYTES
from app.core.model import ModelConfig, SequenceBatching, reached
from app.core.sequence import sequence_ids_of
from app.core.session import reach_s
from app.lint.backends import Declared
from app.lint.ensembles import Models
from app.lint.findings import Code, Finding
from app.pipelines.sessions import stateful_models
from app.pipelines.spec import PipelineSpec, SessionSpec

Fault = tuple[Code, str]


def session_faults(pipelines: Iterable[Declared], models: Models) -> Iterator[Finding]:
    for pipeline, spec in pipelines:
        config = models[spec.model]
        if spec.session is None:
            faults, start = _without_session(config, models), ""
        else:
            faults, start = _of_session(spec, spec.session, config, models), f"pipeline '{pipeline}': "
        yield from (Finding(code, start + text, spec.model, pipeline=pipeline) for code, text in faults)


def _without_session(config: ModelConfig, models: Models) -> Iterator[Fault]:
    """Checks for models that run no request outside of a sequence."""
    ids = sequence_ids_of(config, models)
    if ids.needed_by:
        by = "" if ids.needed_by == config.name else f" because it runs '{ids.needed_by}'"
        yield (
            Code.NEEDS_SESSION,
            f"'{config.name}' needs a session{by}: declare `session: true`, or call it under /v2 with the parameters "
            f"`sequence_id` ({ids.form}), `sequence_start` and `sequence_end`",
        )


def _of_session(spec: PipelineSpec, session: SessionSpec, config: ModelConfig, models: Models) -> Iterator[Fault]:
    stateful = stateful_models(config, models)
    for model in stateful:
        yield from _idle_faults(spec, session, model)
        yield from _place_faults(session, model)
        yield from _control_faults(model)
    if len(stateful) > 1 and (spec.early_exit or _has_others(config, models, stateful)):
        yield Code.SESSION_STATE, _several(stateful)


def _control_faults(model: ModelConfig) -> Iterator[Fault]:
    sequence = model.sequence or SequenceBatching()
    if not sequence.knows_starts:
        text = f"'{model.name}' has no CONTROL_SEQUENCE_START and no `state`: it cannot tell where a sequence begins"
        yield Code.SESSION_STATE, text
    if sequence.id_datatype == BYTES and not sequence.candidates and model.max_batch_size > 1:
        yield (
            Code.SESSION_STATE,
            f"'{model.name}' gets its sequence id as a text, with the direct scheduler and max_batch_size "
            f"{model.max_batch_size}: Triton 2.51 then fails steps while another session pauses",
        )


def _idle_faults(spec: PipelineSpec, session: SessionSpec, model: ModelConfig) -> Iterator[Fault]:
    idle_s = 0.0 if model.sequence is None else model.sequence.idle_s
    longest_s = reach_s(idle_s)
    limits = {"session.idle_s": session.idle_s, "timeout_s": spec.timeout_s or 0.0}
    if spec.stream is not None and "timeout_s" in spec.stream.model_fields_set:
        limits["stream.timeout_s"] = spec.stream.timeout_s
    longer = [f"`{key}` is {value:g} s" for key, value in limits.items() if value > longest_s]
    if longer:
        yield (
            Code.SESSION_IDLE,
            f"{' and '.join(longer)}, but Triton forgets a sequence of '{model.name}' {idle_s:g} s after its last "
            f"request was queued: a step and the pause after it end after {longest_s:g} s",
        )


def _place_faults(session: SessionSpec, model: ModelConfig) -> Iterator[Fault]:
    if session.max_open is not None and session.max_open > model.sequence_slots:
        yield (
            Code.SESSION_PLACES,
            f"`session.max_open` is {session.max_open}, but '{model.name}' runs {model.sequence_slots} sequences at a "
            "time: no more sessions are opened",
        )


def _has_others(config: ModelConfig, models: Models, stateful: Sequence[ModelConfig]) -> bool:
    run = reached(config, models, lambda each: [step.model for step in each.steps])
    return any(not each.steps and each not in stateful for each in run)


def _several(stateful: Sequence[ModelConfig]) -> str:
    first, *others = [f"'{model.name}'" for model in stateful]
    return (
        f"a step runs the stateful models {', '.join([first, *others])} and others: if a model fails or exits early "
        "between them, one has seen a step that the next one has not"
    )
