"""Checks how each ensemble connects its steps: names, datatypes, shapes, batches, and outputs that may be left out.

A ``Wiring`` is one ensemble as its configuration wires it, faults included. The rules are those by which Triton 2.51
loads and runs an ensemble, observed on the server.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from app.codecs.kinds import shape_text
from app.core.model import ModelConfig, Step, TensorSpec
from app.core.text import nearest
from app.lint.findings import Code, Finding
from app.pipelines.spec import PipelineSpec

ENSEMBLE = "ensemble"

Models = Mapping[str, ModelConfig]


@dataclass(frozen=True, slots=True)
class WiredStep:
    """A step; ``config`` is None where its model is not in the repository, or its configuration cannot be read."""

    number: int
    step: Step
    config: ModelConfig | None

    def __str__(self) -> str:
        return f"step {self.number} ('{self.step.model}')"


@dataclass(frozen=True, slots=True)
class TensorEnd:
    """Where a tensor of an ensemble is written or read. ``place`` None: the ensemble's own input or output."""

    place: WiredStep | None
    name: str
    spec: TensorSpec | None
    """None: not known, or no such tensor."""
    is_batched: bool

    def __str__(self) -> str:
        return f"{self.place}" if self.place else "the ensemble itself"


@dataclass(frozen=True, slots=True)
class Wiring:
    """One ensemble as its configuration wires it, faults included: who writes and who reads each of its tensors."""

    config: ModelConfig
    places: tuple[WiredStep, ...]
    writers: dict[str, list[TensorEnd]]
    readers: dict[str, list[TensorEnd]]

    @property
    def name(self) -> str:
        return self.config.name

    def edges(self) -> Iterator[tuple[str, TensorEnd, TensorEnd]]:
        """Tensor, writer, reader."""
        for tensor, ends in self.writers.items():
            for writer in ends:
                yield from ((tensor, writer, reader) for reader in self.readers.get(tensor, ()))

    def runnable(self) -> list[WiredStep]:
        """The steps that can run, in an order in which they can."""
        return [self.places[index] for index in self.config.runnable_steps(spec.name for spec in self.config.inputs)]


def wiring_of(ensemble: ModelConfig, models: Models) -> Wiring:
    places = tuple(WiredStep(number, step, models.get(step.model)) for number, step in enumerate(ensemble.steps, 1))
    batched = ensemble.max_batch_size > 0
    writers: dict[str, list[TensorEnd]] = {}
    readers: dict[str, list[TensorEnd]] = {}
    for spec in ensemble.inputs:
        writers.setdefault(spec.name, []).append(TensorEnd(None, spec.name, spec if spec.is_typed else None, batched))
    for place in places:
        for name, tensor in place.step.input_map:
            readers.setdefault(tensor, []).append(_end(place, name, ModelConfig.input))
        for name, tensor in place.step.output_map:
            writers.setdefault(tensor, []).append(_end(place, name, ModelConfig.output))
    for spec in ensemble.outputs:
        readers.setdefault(spec.name, []).append(TensorEnd(None, spec.name, spec if spec.is_typed else None, batched))
    return Wiring(ensemble, places, writers, readers)


def is_auto_completed(config: ModelConfig) -> bool:
    """Whether Triton is left to ask the model for inputs or outputs: what they are is then not written down."""
    return config.backend != ENSEMBLE and not config.declares_tensors


def models_below(model: str, models: Models) -> Iterator[str]:
    """The model and the models that it runs, directly or through ensembles: each once, in the order of the steps."""
    waiting, seen = [model], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            yield name
            waiting += [step.model for step in reversed(models[name].steps)] if name in models else ()


def decoupled_models(models: Models) -> set[str]:
    """An ensemble is decoupled if one of its steps is. Triton says so only after it has loaded the ensemble."""
    callers: dict[str, set[str]] = {}
    for name, config in models.items():
        for step in config.steps:
            callers.setdefault(step.model, set()).add(name)
    found = {name for name, config in models.items() if config.decoupled}
    waiting = list(found)
    while waiting:
        new = callers.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _end(place: WiredStep, name: str, spec_of: Callable[[ModelConfig, str], TensorSpec | None]) -> TensorEnd:
    if place.config is None:
        return TensorEnd(place, name, None, is_batched=False)
    spec = spec_of(place.config, name)
    return TensorEnd(place, name, spec if spec and spec.is_typed else None, place.config.max_batch_size > 0)


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


def _unknown_tensor(wiring: Wiring, place: WiredStep, name: str, kind: str, valid: list[str]) -> Finding:
    text = f"{place} has no {kind} '{name}'{nearest(name, valid)}"
    return Finding(Code.UNKNOWN_TENSOR, text, wiring.name, place.number, name)


_FREE = -1


def mismatches(wiring: Wiring) -> Iterator[Finding]:
    for tensor, writer, reader in wiring.edges():
        if found := _mismatch(tensor, writer, reader, wiring.config.max_batch_size):
            code, text = found
            where = reader.place or writer.place
            yield Finding(code, text, wiring.name, where.number if where else None, tensor)


def batch_sizes(wiring: Wiring) -> Iterator[Finding]:
    size = wiring.config.max_batch_size
    for place in wiring.places:
        if place.config is not None and 0 < place.config.max_batch_size < size:
            text = f"{place} takes batches of {place.config.max_batch_size} at most, the ensemble of {size}"
            yield Finding(Code.BATCH_MISMATCH, text, wiring.name, place.number)


def decoupled_joins(wiring: Wiring, decoupled: Set[str]) -> Iterator[Finding]:
    """A step whose inputs come with different numbers of responses, or such outputs of the ensemble."""
    origin: dict[str, WiredStep | None] = {spec.name: None for spec in wiring.config.inputs}
    for place in wiring.runnable():
        tensors = [tensor for _, tensor in place.step.input_map]
        if found := _join(wiring, tensors, origin, place):
            yield found
        own = place if place.step.model in decoupled else None
        inherited = origin[tensors[0]] if tensors else None
        origin |= {tensor: own or inherited for _, tensor in place.step.output_map}
    outputs = [spec.name for spec in wiring.config.outputs if spec.name in origin]
    if found := _join(wiring, outputs, origin, None):
        yield found


def unordered_streams(wiring: Wiring, decoupled: Set[str]) -> Iterator[Finding]:
    streamed: set[str] = set()
    for place in wiring.runnable():
        reads_stream = any(tensor in streamed for _, tensor in place.step.input_map)
        if reads_stream and place.config is not None and place.config.instance_count > 1:
            count = place.config.instance_count
            text = f"{place} has {count} instances behind a decoupled step: responses may arrive in the wrong order"
            yield Finding(Code.UNORDERED_STREAM, text, wiring.name, place.number)
        if reads_stream or place.step.model in decoupled:
            streamed |= {tensor for _, tensor in place.step.output_map}


def routers_needed(wiring: Wiring) -> Iterator[Finding]:
    """A shared tensor that a Python model may read in GPU memory, see docs/reference/checks.md#router-needed."""
    for tensor, readers in wiring.readers.items():
        steps = [end.place for end in readers if end.place is not None]
        for place in steps if len(steps) > 1 else ():
            if place.config is not None and place.config.parameter("FORCE_CPU_ONLY_INPUT_TENSORS") == "no":
                text = (
                    f"{place} may read '{tensor}' in GPU memory shared with other steps: in-place changes affect them"
                )
                yield Finding(Code.ROUTER_NEEDED, text, wiring.name, place.number, tensor)


def _mismatch(tensor: str, writer: TensorEnd, reader: TensorEnd, largest_batch: int) -> tuple[Code, str] | None:
    """Returns a mismatch of datatype, shape or batch between the two ends of an edge.

    Where only one end has a batch dimension, Triton takes the dimension away or adds one, as long as the batch is of
    one.
    """
    given, wanted = writer.spec, reader.spec
    if given is None or wanted is None:
        return None
    if given.datatype != wanted.datatype:
        return Code.DATATYPE_MISMATCH, _difference(tensor, writer, reader, given.datatype, wanted.datatype)
    if _agree(_whole(writer, given.dims), _whole(reader, wanted.dims)):
        return None
    shapes = shape_text(given.dims), shape_text(wanted.dims)
    if not _agree(given.dims, wanted.dims):
        return Code.SHAPE_MISMATCH, _difference(tensor, writer, reader, *shapes)
    if writer.is_batched and not reader.is_batched and largest_batch > 1:
        sides = (f"up to {largest_batch} of {shapes[0]}", f"one {shapes[1]}: a batch of one fits, a larger one fails")
        return Code.BATCH_MISMATCH, _difference(tensor, writer, reader, *sides)
    return None


def _difference(tensor: str, writer: TensorEnd, reader: TensorEnd, given: str, wanted: str) -> str:
    return f"{writer} gives '{tensor}' as {given}, {reader} takes {wanted}"


def _join(
    wiring: Wiring, tensors: list[str], origin: dict[str, WiredStep | None], place: WiredStep | None
) -> Finding | None:
    first = next((tensor for tensor in tensors if origin[tensor] is not None), None)
    other = next((tensor for tensor in tensors if first and origin[tensor] != origin[first]), None)
    if first is None or other is None:
        return None
    text = (
        f"{place or 'the ensemble itself'} joins '{first}', which comes with every response of {origin[first]}, with "
        f"'{other}', which does not: {origin[first]} must write '{other}' with each response too"
    )
    return Finding(Code.DECOUPLED_JOIN, text, wiring.name, place.number if place else None, other)


def _whole(end: TensorEnd, dims: tuple[int, ...]) -> tuple[int, ...]:
    return (_FREE, *dims) if end.is_batched else dims


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or _FREE in (a, b) for a, b in zip(one, other, strict=True))


Output = tuple[str, str]
"""Model, output."""


def omitted_inputs(wiring: Wiring, omissible: Set[Output]) -> Iterator[Finding]:
    """Finds inputs of steps that lack their tensor, because an output is declared to be left out at times."""
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
    """Returns the declared omissions, and those that follow through ensembles, from step to ensemble and back.

    Omissions are declared by a model's parameter ``may_omit`` (config.pbtxt) or by a pipeline's early-exit rule
    ``missing``.
    """
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
