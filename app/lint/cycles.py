"""Checks for what runs in a circle: tensors of an ensemble, ensembles through each other, BLS calls.

Checks parallel steps that may fail, because Triton 2.51 can crash then (docs/explanation/triton-crash-fan-out.md).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from app.core.model import RepositoryModel
from app.lint.ensembles import Models, WiredStep, Wiring, models_below
from app.lint.findings import Code, Finding
from app.pipelines.spec import PipelineSpec

_N = TypeVar("_N")


def tensor_cycles(wiring: Wiring) -> Iterator[Finding]:
    waits_for = {
        place.number: {
            end.place.number
            for _, tensor in place.step.input_map
            for end in wiring.writers.get(tensor, ())
            if end.place is not None
        }
        for place in wiring.places
    }
    for cycle in _cycles(waits_for):
        places = [wiring.places[number - 1] for number in cycle]
        text = "steps wait for each other's outputs: " + " <- ".join(map(str, [*places, places[0]]))
        yield Finding(Code.CYCLE, text, wiring.name, min(cycle))


def ensemble_cycles(models: Iterable[RepositoryModel]) -> Iterator[Finding]:
    runs = {model.folder: {step.model for step in model.config.steps} for model in models}
    for cycle in _cycles(runs):
        yield Finding(Code.CYCLE, f"ensembles run each other: {_circle(cycle)}", cycle[0])


def bls_cycles(models: Iterable[RepositoryModel]) -> Iterator[Finding]:
    """A model that calls itself, or runs something that calls it: with every instance busy, all wait forever."""
    models = list(models)
    runs = {model.folder: {step.model for step in model.config.steps} | model.calls for model in models}
    callers = {model.folder for model in models if model.calls}
    for cycle in _cycles(runs):
        if callers & set(cycle):
            text = f"a script calls itself: {_circle(cycle)}; once all instances wait, they wait forever"
            yield Finding(Code.BLS_CYCLE, text, next(name for name in cycle if name in callers))


def _circle(cycle: list[str]) -> str:
    return " -> ".join([*cycle, cycle[0]])


def _cycles(edges: Mapping[_N, Iterable[_N]]) -> list[list[_N]]:
    """One cycle for each group of nodes that reach each other."""
    found: list[list[_N]] = []
    seen: set[_N] = set()
    for start in edges:
        cycle = None if start in seen else _way_back(start, edges)
        if cycle is not None:
            found.append(cycle)
            seen |= set(cycle)
    return found


def _way_back(start: _N, edges: Mapping[_N, Iterable[_N]]) -> list[_N] | None:
    """The shortest way from a node to itself."""
    before: dict[_N, _N] = {}
    waiting = [start]
    for node in waiting:
        for following in edges.get(node, ()):
            if following == start:
                return _way(start, node, before)
            if following not in before:
                before[following] = node
                waiting.append(following)
    return None


def _way(start: _N, end: _N, before: Mapping[_N, _N]) -> list[_N]:
    way = [end]
    while way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]


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


def _is_ordered(one: WiredStep, other: WiredStep, before: Mapping[int, frozenset[int]]) -> bool:
    return one is other or one.number in before[other.number] or other.number in before[one.number]
