"""Checks for what runs in a circle: tensors of an ensemble, ensembles through each other, BLS calls."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from app.domain.model import RepositoryModel
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import Wiring

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
