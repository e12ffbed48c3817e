"""Checks parallel steps that may fail, because Triton 2.51 can crash then (docs/explanation/fan-out.md)."""

from collections.abc import Iterator, Mapping, Sequence

from app.domain.model import RepositoryModel
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import Models, Place, Wiring, models_below
from app.pipelines.spec import PipelineSpec

Reasons = Mapping[str, str]
"""Model -> why it may fail."""


def reasons_to_fail(
    ensemble: str, repository: Sequence[RepositoryModel], pipelines: Mapping[str, PipelineSpec]
) -> dict[str, str]:
    """Returns the known reasons for failures, from declarations and scripts. Any model may also fail unexpectedly."""
    models = {model.folder: model.config for model in repository}
    reasons: dict[str, str] = {}
    for name, spec in pipelines.items():
        if spec.rejects_input and ensemble in models_below(spec.model, models):
            reasons |= dict.fromkeys(spec.rejects_input, f"pipeline '{name}' lists it under rejects_input")
    for model in repository:
        if model.files is not None and model.files.sends_errors:
            reasons[model.folder] = "its script sends errors"
        elif model.config.limits_queue:
            reasons[model.folder] = "its queue policy refuses requests"
    return reasons


def parallel_failures(wiring: Wiring, models: Models, reasons: Reasons) -> Iterator[Finding]:
    """One finding for each step that may fail while another step runs."""
    runnable, before = (wiring.runnable(), _steps_before(wiring)) if reasons else ([], {})
    for place in runnable:
        reason = _reason(place.step.model, models, reasons)
        beside = next((other for other in runnable if not _is_ordered(place, other, before)), None)
        if reason and beside:
            text = (
                f"{place} may fail ({reason}) while {beside} runs, and Triton 2.51 can crash then: refuse in a step "
                "before both, or run them from a BLS script"
            )
            yield Finding(Code.PARALLEL_FAILURE, text, wiring.name, place.number)


def _reason(model: str, models: Models, reasons: Reasons) -> str:
    """Why the model may fail. An ensemble may fail as soon as one of its steps may."""
    return next((reasons[name] for name in models_below(model, models) if name in reasons), "")


def _steps_before(wiring: Wiring) -> dict[int, frozenset[int]]:
    """Step -> the steps that it waits for, directly or not."""
    before: dict[int, frozenset[int]] = {}
    writers: dict[str, frozenset[int]] = {}
    for place in wiring.runnable():
        before[place.number] = frozenset().union(*(writers.get(tensor, ()) for _, tensor in place.step.input_map))
        writers |= {tensor: before[place.number] | {place.number} for _, tensor in place.step.output_map}
    return before


def _is_ordered(one: Place, other: Place, before: Mapping[int, frozenset[int]]) -> bool:
    return one is other or one.number in before[other.number] or other.number in before[one.number]
