"""Which step failed, or ended a request early. Triton marks neither in its spans: it follows from what ran."""

from collections.abc import Sequence
from enum import StrEnum

from app.domain.errors import Outcome
from app.observability.explain.request import Ended, Plan
from app.observability.explain.tree import Kind, Run


class State(StrEnum):
    OK = "ok"
    FAILED = "failed"
    EARLY_EXIT = "early_exit"
    UNKNOWN = "unknown"


_CUT_SHORT = {Outcome.TIMEOUT, Outcome.CANCELLED, Outcome.INTERNAL, Outcome.UNAVAILABLE, Outcome.REJECTED}
"""The gateway did not wait for Triton's answer, or got none."""


def states_of(runs: Sequence[Run], plan: Plan, ended: Ended) -> dict[str, State]:
    """The state of each run, by the id of its span. ``runs``: all of one call, the pipeline's model first."""
    outcome = ended.outcome
    if outcome in _CUT_SHORT:
        return {run.span.span_id: State.UNKNOWN for run in runs}
    states = {run.span.span_id: State.OK for run in runs}
    if outcome is Outcome.OK or not runs:
        return states
    ending = State.EARLY_EXIT if outcome is Outcome.EARLY_EXIT else State.FAILED
    root, *below = runs
    states[root.span.span_id] = ending
    if ended.outcome is Outcome.CONTRACT_VIOLATION and not ended.failed_step:
        return states  # the gateway refused what the steps had answered
    guilty = _named(below, ended.failed_step) or _last(below, plan, ending)
    mark = ending if len(guilty) == 1 else State.UNKNOWN
    return states | {run.span.span_id: mark for run in guilty}


def not_run(runs: Sequence[Run], plan: Plan) -> list[str]:
    seen = {run.name for run in runs if run.kind is Kind.STEP}
    return [step.name for step in plan.steps if step.name not in seen]


def _named(runs: Sequence[Run], model: str) -> list[Run]:
    return [run for run in runs if run.span.model == model][-1:]


def _last(runs: Sequence[Run], plan: Plan, ending: State) -> list[Run]:
    """The steps after which nothing ran. An early exit with all steps run was decided from the outputs."""
    steps = [run for run in runs if run.kind is Kind.STEP]
    if ending is State.EARLY_EXIT and not not_run(steps, plan):
        return []
    names = {run.name for run in steps}
    continued = {before for before, after in plan.next_steps if after in names}
    return [run for run in steps if run.name not in continued] or [run for run in runs if run.kind is Kind.BLS][-1:]
