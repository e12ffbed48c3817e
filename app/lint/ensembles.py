"""Checks how each ensemble connects its steps, and what runs in a circle.

A ``Wiring`` is one ensemble as its configuration wires it, faults included. The rules are those by which Triton 2.51
loads and runs an ensemble, observed on the server. It can crash when a step fails while another runs
(docs/explanation/triton-crash-fan-out.md).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from app.codecs.kinds import agree, shape_text
from app.core.model import Finding, ModelConfig, RepositoryModel, Step, TensorSpec, walk
from app.core.text import nearest
from app.pipelines.spec import PipelineSpec
from app.steps.planner import cycles

Models = Mapping[str, ModelConfig]


def findings_of_ensembles(
    repository: Sequence[RepositoryModel], pipelines: Mapping[str, PipelineSpec]
) -> Iterator[Finding]:
    models = {model.folder: model.config for model in repository}
    versions = {model.folder: model.versions for model in repository}
    readable = {model.folder: model.config for model in repository if not model.complaint}
    wirings = [
        Wiring(model.config, readable)
        for model in repository
        # a step's map that lost entries would lead to other findings
        if model.config.is_ensemble
        and model.folder in readable
        and all(each.code != "duplicate-key" for each in model.findings)
    ]
    decoupled = decoupled_models(models)
    yield from _model_cycles(repository)
    for wiring in wirings:
        yield from _step_faults(wiring, models, versions)
        yield from _tensor_faults(wiring)
        yield from _tensor_cycles(wiring)
        yield from _edge_faults(wiring)
        yield from _stream_faults(wiring, decoupled)
    yield from _parallel_failures(wirings, repository, pipelines)
    yield from _omitted_inputs(models, wirings, pipelines.values())


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


class Wiring:
    """The wiring of one ensemble, including its faults: which steps write and read each of its tensors."""

    def __init__(self, config: ModelConfig, models: Models) -> None:
        self.config = config
        self.places = [WiredStep(number, step, models.get(step.model)) for number, step in enumerate(config.steps, 1)]
        self.writers: dict[str, list[TensorEnd]] = {}
        self.readers: dict[str, list[TensorEnd]] = {}
        for spec in config.inputs:
            self.writers.setdefault(spec.name, []).append(_end(None, spec.name, config, config.inputs))
        for place in self.places:
            inputs, outputs = (place.config.inputs, place.config.outputs) if place.config else ((), ())
            for name, tensor in place.step.input_map:
                self.readers.setdefault(tensor, []).append(_end(place, name, place.config, inputs))
            for name, tensor in place.step.output_map:
                self.writers.setdefault(tensor, []).append(_end(place, name, place.config, outputs))
        for spec in config.outputs:
            self.readers.setdefault(spec.name, []).append(_end(None, spec.name, config, config.outputs))

    def edges(self) -> Iterator[tuple[str, TensorEnd, TensorEnd]]:
        """Tensor, writer, reader."""
        for tensor, ends in self.writers.items():
            for writer in ends:
                yield from ((tensor, writer, reader) for reader in self.readers.get(tensor, ()))

    def runnable(self) -> list[WiredStep]:
        """The steps that can run, in an order in which they can."""
        return [self.places[index] for index in self.config.runnable_steps(spec.name for spec in self.config.inputs)]

    def finding(self, code: str, text: str, place: WiredStep | None, tensor: str | None = None) -> Finding:
        return Finding(code, text, self.config.name, place.number if place else None, tensor)


def _end(place: WiredStep | None, name: str, config: ModelConfig | None, specs: Iterable[TensorSpec]) -> TensorEnd:
    spec = next((spec for spec in specs if spec.name == name and spec.is_typed), None)
    return TensorEnd(place, name, spec, is_batched=config is not None and config.max_batch_size > 0)


def is_auto_completed(config: ModelConfig) -> bool:
    """Whether Triton is left to ask the model for inputs or outputs: what they are is then not written down."""
    return config.backend != "ensemble" and not config.declares_tensors


def models_below(model: str, models: Models) -> Iterator[str]:
    """The model and the models that it runs, directly or through ensembles: each once, in the order of the steps."""
    return walk([model], lambda name: [step.model for step in models[name].steps] if name in models else ())


def decoupled_models(models: Models) -> set[str]:
    """An ensemble is decoupled if a step is. Triton's configuration has this only after it has loaded the ensemble."""
    callers: dict[str, set[str]] = {}
    for name, config in models.items():
        for step in config.steps:
            callers.setdefault(step.model, set()).add(name)
    return set(walk([name for name, each in models.items() if each.decoupled], lambda name: callers.get(name, ())))


def _step_faults(wiring: Wiring, models: Models, versions: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Checks each step by itself. ``versions``: those that Triton loads, by model."""
    for place in wiring.places:
        step, config, loaded = place.step, place.config, versions.get(place.step.model)
        if step.model not in models:
            text = f"{place} is not a model in the repository{nearest(step.model, sorted(models))}"
            yield wiring.finding("unknown-model", text, place)
        if loaded and step.version and step.version not in loaded:
            text = f"{place} needs version {step.version} of a model that loads {', '.join(loaded)}"
            yield wiring.finding("unknown-version", text, place)
        if config is None:
            continue
        mapped = {name for name, _ in step.input_map}
        for spec in config.inputs:
            if not spec.optional and spec.name not in mapped:
                text = f"{place} does not map its required input '{spec.name}': map the input, or declare it optional"
                yield wiring.finding("unmapped-input", text, place, spec.name)
        if 0 < config.max_batch_size < wiring.config.max_batch_size:
            most = f"{config.max_batch_size} at most, the ensemble of {wiring.config.max_batch_size}"
            yield wiring.finding("batch-mismatch", f"{place} takes batches of {most}", place)
        if is_auto_completed(config):
            text = f"{place} relies on auto-completion: its edges are not checked (to check them, use --triton)"
            yield wiring.finding("unknown-edge", text, place)
            continue
        for kind, entries, specs in (
            ("input", step.input_map, config.inputs),
            ("output", step.output_map, config.outputs),
        ):
            names = [spec.name for spec in specs]
            for name in (name for name, _ in entries if name not in names):
                text = f"{place} has no {kind} '{name}'{nearest(name, names)}"
                yield wiring.finding("unknown-tensor", text, place, name)


def _tensor_faults(wiring: Wiring) -> Iterator[Finding]:
    """Checks that each tensor of the ensemble is written once and read, and whether readers may share its memory."""
    for tensor, readers in wiring.readers.items():
        if tensor not in wiring.writers:
            text = f"no step writes '{tensor}', which {readers[0]} needs{nearest(tensor, sorted(wiring.writers))}"
            yield wiring.finding("unwritten-tensor", text, readers[0].place, tensor)
        steps = [end.place for end in readers if end.place is not None]
        for place in steps if len(steps) > 1 else ():
            if place.config is not None and place.config.parameter("FORCE_CPU_ONLY_INPUT_TENSORS") == "no":
                shared = "in GPU memory shared with other steps: in-place changes affect them"
                yield wiring.finding("router-needed", f"{place} may read '{tensor}' {shared}", place, tensor)
    for tensor, writers in wiring.writers.items():
        if tensor not in wiring.readers:
            text = f"no step reads '{tensor}', which {writers[0]} writes: remove it from the maps"
            yield wiring.finding("unread-tensor", text, writers[0].place, tensor)
        if len(writers) > 1:
            text = f"'{tensor}' is written by {writers[0]} and by {writers[1]}: use a different name for each"
            yield wiring.finding("written-twice", text, writers[1].place, tensor)


def _edge_faults(wiring: Wiring) -> Iterator[Finding]:
    """Checks datatypes, shapes and batches at both ends of each edge.

    Where only one end has a batch dimension, Triton takes the dimension away or adds one, as long as the batch is of
    one.
    """
    largest = wiring.config.max_batch_size
    for tensor, writer, reader in wiring.edges():
        given, wanted = writer.spec, reader.spec
        if given is None or wanted is None:
            continue
        sides = shape_text(given.dims), shape_text(wanted.dims)
        if given.datatype != wanted.datatype:
            code, sides = "datatype-mismatch", (given.datatype, wanted.datatype)
        elif agree((-1,) * writer.is_batched + given.dims, (-1,) * reader.is_batched + wanted.dims):
            continue
        elif not agree(given.dims, wanted.dims):
            code = "shape-mismatch"
        elif writer.is_batched and not reader.is_batched and largest > 1:
            one = f"one {sides[1]}: a batch of one fits, a larger one fails"
            code, sides = "batch-mismatch", (f"up to {largest} of {sides[0]}", one)
        else:
            continue
        text = f"{writer} gives '{tensor}' as {sides[0]}, {reader} takes {sides[1]}"
        yield wiring.finding(code, text, reader.place or writer.place, tensor)


def _stream_faults(wiring: Wiring, decoupled: Set[str]) -> Iterator[Finding]:
    """Finds joins of different numbers of responses, and steps that may change the order of responses."""
    origin: dict[str, WiredStep | None] = {spec.name: None for spec in wiring.config.inputs}
    streamed: set[str] = set()
    for place in wiring.runnable():
        tensors, written = ([tensor for _, tensor in each] for each in (place.step.input_map, place.step.output_map))
        yield from _join(wiring, tensors, origin, place)
        count = 1 if place.config is None else place.config.instance_count
        reads_stream = not streamed.isdisjoint(tensors)
        if reads_stream and count > 1:
            text = f"{place} has {count} instances behind a decoupled step: responses may arrive in the wrong order"
            yield wiring.finding("unordered-stream", text, place)
        is_decoupled = place.step.model in decoupled
        streamed.update(written if reads_stream or is_decoupled else ())
        origin |= dict.fromkeys(written, place if is_decoupled else origin[tensors[0]] if tensors else None)
    yield from _join(wiring, [spec.name for spec in wiring.config.outputs if spec.name in origin], origin, None)


def _join(
    wiring: Wiring, tensors: Sequence[str], origin: Mapping[str, WiredStep | None], place: WiredStep | None
) -> Iterator[Finding]:
    """``origin``: the decoupled step with whose responses a tensor comes. ``place``: what reads the tensors."""
    first = next((tensor for tensor in tensors if origin[tensor] is not None), None)
    other = next((tensor for tensor in tensors if first and origin[tensor] != origin[first]), None)
    if first is not None and other is not None:
        text = (
            f"{place or 'the ensemble itself'} joins '{first}', which comes with every response of {origin[first]}, "
            f"with '{other}', which does not: {origin[first]} must write '{other}' with each response too"
        )
        yield wiring.finding("decoupled-join", text, place, other)


def _omitted_inputs(models: Models, wirings: Sequence[Wiring], pipelines: Iterable[PipelineSpec]) -> Iterator[Finding]:
    """Finds inputs of steps that lack their tensor, because an output is declared to be left out at times.

    Omissions are declared by a model's parameter ``may_omit`` (config.pbtxt) or by a pipeline's early-exit rule
    ``missing``. An ensemble omits what its steps omit, and the reverse.
    """
    declared = [(name, output) for name, config in models.items() for output in config.names_in("may_omit")]
    declared += [(spec.model, name) for spec in pipelines for rule in spec.early_exit for name in rule.missing or ()]
    same: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for wiring in wirings:
        for tensor, writer, reader in wiring.edges():
            if writer.place is not None and reader.place is None:
                whole, part = (wiring.config.name, tensor), (writer.place.step.model, writer.name)
                same.setdefault(whole, set()).add(part)
                same.setdefault(part, set()).add(whole)
    omissible = set(walk(declared, lambda output: same.get(output, ())))
    for wiring in wirings:
        for tensor, writer, reader in wiring.edges():
            if writer.place is None or reader.place is None or (writer.place.step.model, writer.name) not in omissible:
                continue
            if reader.spec is not None and not reader.spec.optional:
                text = (
                    f"{writer.place} may leave out '{writer.name}', and {reader.place} requires it as '{reader.name}': "
                    "declare that input optional, or end the request with an early-exit error"
                )
                yield wiring.finding("omitted-input", text, reader.place, tensor)


def _tensor_cycles(wiring: Wiring) -> Iterator[Finding]:
    waits_for: dict[int, set[int]] = {place.number: set() for place in wiring.places}
    for _, writer, reader in wiring.edges():
        if writer.place is not None and reader.place is not None:
            waits_for[reader.place.number].add(writer.place.number)
    for cycle in cycles(waits_for):
        places = [wiring.places[number - 1] for number in (*cycle, cycle[0])]
        text = "steps wait for each other's outputs: " + " <- ".join(map(str, places))
        yield wiring.finding("cycle", text, wiring.places[min(cycle) - 1])


def _model_cycles(models: Sequence[RepositoryModel]) -> Iterator[Finding]:
    """A script that calls itself, or what calls it: with every instance busy, all wait forever."""
    runs = {model.folder: [step.model for step in model.config.steps] for model in models}
    for cycle in cycles(runs):
        yield Finding("cycle", f"ensembles run each other: {' -> '.join([*cycle, cycle[0]])}", cycle[0])
    callers = {model.folder for model in models if model.calls}
    for cycle in cycles({model.folder: [*runs[model.folder], *sorted(model.calls)] for model in models}):
        if callers & set(cycle):
            circle = " -> ".join([*cycle, cycle[0]])
            text = f"a script calls itself: {circle}; once all instances wait, they wait forever"
            yield Finding("bls-cycle", text, next(name for name in cycle if name in callers))


def _parallel_failures(
    wirings: Iterable[Wiring], repository: Sequence[RepositoryModel], pipelines: Mapping[str, PipelineSpec]
) -> Iterator[Finding]:
    """Finds each step that may fail while another step runs."""
    models = {model.folder: model.config for model in repository}
    known = {model.folder: "its script sends errors" for model in repository if model.sends_errors}
    for model in repository:
        if model.config.limits_queue:
            known.setdefault(model.folder, "its queue policy refuses requests")
    for wiring in wirings:
        reasons: dict[str, str] = {}  # from declarations and scripts; any model may also fail unexpectedly
        for name, spec in pipelines.items():
            if spec.rejects_input and wiring.config.name in models_below(spec.model, models):
                reasons |= dict.fromkeys(spec.rejects_input, f"pipeline '{name}' lists it under rejects_input")
        reasons |= known
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
