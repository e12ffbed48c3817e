"""Outputs that are declared to be left out at times, and the inputs that then lack them.

Declared by a model's parameter ``may_omit`` (config.pbtxt) or by a pipeline's early-exit rule ``missing``.
"""

from collections.abc import Iterable, Iterator, Set

from app.pipelines.linter.findings import Code, Finding
from app.pipelines.linter.wiring import Models, Wiring
from app.pipelines.spec import PipelineSpec

Output = tuple[str, str]
"""Model, output."""


def omitted_inputs(wiring: Wiring, omissible: Set[Output]) -> Iterator[Finding]:
    for tensor, writer, reader in wiring.edges():
        if writer.place is None or reader.place is None or (writer.place.step.model, writer.name) not in omissible:
            continue
        if reader.spec is not None and not reader.spec.optional:
            text = (
                f"{writer.place} may leave out '{writer.name}', and {reader.place} requires it as '{reader.name}': "
                "declare that input optional, or end the request with an early-exit error"
            )
            yield Finding(Code.OMITTED_INPUT, text, wiring.name, reader.place.number, tensor)


def omissible_outputs(models: Models, wirings: Iterable[Wiring], pipelines: Iterable[PipelineSpec]) -> set[Output]:
    """Returns the declared omissions, and those that follow through ensembles, from step to ensemble and back."""
    found = {(name, output) for name, config in models.items() for output in config.may_omit}
    found |= {(spec.model, name) for spec in pipelines for rule in spec.early_exit for name in rule.missing or ()}
    same = [pair for wiring in wirings for pair in _same_outputs(wiring)]
    while more := {b for a, b in same if a in found} | {a for a, b in same if b in found}:
        if more <= found:
            break
        found |= more
    return found


def _same_outputs(wiring: Wiring) -> Iterator[tuple[Output, Output]]:
    """An ensemble's output and the output of the step that writes it."""
    for tensor, writer, reader in wiring.edges():
        if writer.place is not None and reader.place is None:
            yield (wiring.name, tensor), (writer.place.step.model, writer.name)
