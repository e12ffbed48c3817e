"""Checks for what runs in a circle: tensors of an ensemble, ensembles through each other, BLS calls.

Checks parallel steps that may fail, because Triton 2.51 can crash then (docs/explanation/triton-crash-fan-out.md).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from app.core.model import Node, RepositoryModel
from app.lint.ensembles import Models, Wiring, models_below
from app.lint.findings import Finding
from app.pipelines.spec import PipelineSpec


def tensor_cycles(wiring: Wiring) -> Iterator[Finding]:
    writers = {
        tensor: [end.place.number for end in ends if end.place is not None] for tensor, ends in wiring.writers.items()
    }
    waits_for = {
        place.number: {number for _, tensor in place.step.input_map for number in writers.get(tensor, ())}
        for place in wiring.places
    }
    for cycle in _cycles(waits_for):
        places = [wiring.places[number - 1] for number in (*cycle, cycle[0])]
        text = "steps wait for each other's outputs: " + " <- ".join(map(str, places))
        yield wiring.finding("cycle", text, wiring.places[min(cycle) - 1])


def model_cycles(models: Sequence[RepositoryModel]) -> Iterator[Finding]:
    """A script that calls itself, or what calls it: with every instance busy, all wait forever."""
    runs = {model.folder: [step.model for step in model.config.steps] for model in models}
    for cycle in _cycles(runs):
        yield Finding("cycle", f"ensembles run each other: {' -> '.join([*cycle, cycle[0]])}", cycle[0])
    callers = {model.folder for model in models if model.calls}
    for cycle in _cycles({model.folder: [*runs[model.folder], *sorted(model.calls)] for model in models}):
        if callers & set(cycle):
            circle = " -> ".join([*cycle, cycle[0]])
            text = f"a script calls itself: {circle}; once all instances wait, they wait forever"
            yield Finding("bls-cycle", text, next(name for name in cycle if name in callers))


def _cycles(edges: Mapping[Node, Iterable[Node]]) -> Iterator[list[Node]]:
    """Yields cycles until each one shares a node with one of them. A cycle begins with its first node in ``edges``."""
    left, order = dict(edges), {node: place for place, node in enumerate(edges)}
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as exc:
            cycle = exc.args[1][:0:-1]  # graphlib takes what follows a node for what precedes it
            first = cycle.index(min(cycle, key=order.__getitem__))
            yield cycle[first:] + cycle[:first]
            left = {node: {*following} - {*cycle} for node, following in left.items() if node not in cycle}
        else:
            return


def parallel_failures(
    wirings: Iterable[Wiring], repository: Sequence[RepositoryModel], pipelines: Mapping[str, PipelineSpec]
) -> Iterator[Finding]:
    """Finds each step that may fail while another step runs."""
    models = {model.folder: model.config for model in repository}
    for wiring in wirings:
        reasons = _reasons_to_fail(wiring.config.name, models, repository, pipelines)
        runnable = wiring.runnable() if reasons else []
        before: dict[int, frozenset[int]] = {}
        """Step -> the steps that it waits for, directly or not."""
        writers: dict[str, frozenset[int]] = {}
        for place in runnable:
            before[place.number] = frozenset().union(*(writers.get(tensor, ()) for _, tensor in place.step.input_map))
            writers |= {tensor: before[place.number] | {place.number} for _, tensor in place.step.output_map}
        for place in runnable:
            # An ensemble may fail as soon as one of its steps may.
            reason = next((reasons[each] for each in models_below(place.step.model, models) if each in reasons), "")
            earlier = {place.number, *before[place.number]}
            others = (x for x in runnable if x.number not in earlier and place.number not in before[x.number])
            if reason and (beside := next(others, None)):
                text = f"{place} may fail ({reason}) while {beside} runs, and Triton 2.51 can crash then"
                remedy = "refuse in a step before both, or run them from a BLS script"
                yield wiring.finding("parallel-failure", f"{text}: {remedy}", place)


def _reasons_to_fail(
    ensemble: str, models: Models, repository: Sequence[RepositoryModel], pipelines: Mapping[str, PipelineSpec]
) -> dict[str, str]:
    """The known reasons by model, from declarations and scripts. Any model may also fail unexpectedly."""
    reasons: dict[str, str] = {}
    for name, spec in pipelines.items():
        if spec.rejects_input and ensemble in models_below(spec.model, models):
            reasons |= dict.fromkeys(spec.rejects_input, f"pipeline '{name}' lists it under rejects_input")
    for model in repository:
        if model.sends_errors:
            reasons[model.folder] = "its script sends errors"
        elif model.config.limits_queue:
            reasons[model.folder] = "its queue policy refuses requests"
    return reasons
