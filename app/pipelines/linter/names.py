"""Checks of names: missing models, versions and tensors, and tensors without a reader or with zero or two writers."""

from collections.abc import Iterator

from app.domain.nearest import nearest
from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import Models, Place, Wiring, is_auto_completed


def unknown_models(wiring: Wiring, models: Models) -> Iterator[Finding]:
    for place in wiring.places:
        if place.step.model not in models:
            text = f"{place} is not a model in the repository{nearest(place.step.model, sorted(models))}"
            yield Finding(Code.UNKNOWN_MODEL, text, wiring.name, place.number)


def unknown_tensors(wiring: Wiring) -> Iterator[Finding]:
    for place in wiring.places:
        config = place.config
        if config is None or is_auto_completed(config):
            continue
        for name, _ in place.step.input_map:
            if config.input(name) is None:
                yield _unknown_tensor(wiring, place, name, "input", [spec.name for spec in config.inputs])
        for name, _ in place.step.output_map:
            if config.output(name) is None:
                yield _unknown_tensor(wiring, place, name, "output", [spec.name for spec in config.outputs])


def unmapped_inputs(wiring: Wiring) -> Iterator[Finding]:
    for place in wiring.places:
        mapped = {name for name, _ in place.step.input_map}
        for spec in place.config.inputs if place.config else ():
            if not spec.optional and spec.name not in mapped:
                text = f"{place} does not map its required input '{spec.name}': map the input, or declare it optional"
                yield Finding(Code.UNMAPPED_INPUT, text, wiring.name, place.number, spec.name)


def unwritten_tensors(wiring: Wiring) -> Iterator[Finding]:
    for tensor, readers in wiring.readers.items():
        if tensor not in wiring.writers:
            where = readers[0].place.number if readers[0].place else None
            text = f"no step writes '{tensor}', which {readers[0]} needs{nearest(tensor, sorted(wiring.writers))}"
            yield Finding(Code.UNWRITTEN_TENSOR, text, wiring.name, where, tensor)


def unread_tensors(wiring: Wiring) -> Iterator[Finding]:
    for tensor, writers in wiring.writers.items():
        if tensor not in wiring.readers:
            where = writers[0].place.number if writers[0].place else None
            text = f"no step reads '{tensor}', which {writers[0]} writes: remove it from the maps"
            yield Finding(Code.UNREAD_TENSOR, text, wiring.name, where, tensor)


def written_twice(wiring: Wiring) -> Iterator[Finding]:
    for tensor, writers in wiring.writers.items():
        if len(writers) > 1:
            text = f"'{tensor}' is written by {writers[0]} and by {writers[1]}: use a different name for each"
            where = writers[1].place.number if writers[1].place else None
            yield Finding(Code.WRITTEN_TWICE, text, wiring.name, where, tensor)


def unknown_edges(wiring: Wiring) -> Iterator[Finding]:
    """Once for each step whose tensors cannot be compared."""
    for place in wiring.places:
        if place.config is not None and is_auto_completed(place.config):
            text = f"{place} relies on auto-completion: its edges are not checked (to check them, use --triton)"
            yield Finding(Code.UNKNOWN_EDGE, text, wiring.name, place.number)


def _unknown_tensor(wiring: Wiring, place: Place, name: str, kind: str, valid: list[str]) -> Finding:
    text = f"{place} has no {kind} '{name}'{nearest(name, valid)}"
    return Finding(Code.UNKNOWN_TENSOR, text, wiring.name, place.number, name)
