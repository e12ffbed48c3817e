"""Compiles the steps of a pipeline for the models that they call.

Finds unknown tensors, types and shapes that do not fit, circles, conditions that can never hold, and outputs that may
be missing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from app.codecs.kinds import agree, converted, shape_text, to_array_of
from app.codecs.numbers import ANY_NUMBER, number_type
from app.config.document import Location
from app.config.mismatch import PipelineMismatch, mismatch_at, named, tensor_named
from app.core.inference import BYTES, FLOAT_DATATYPES, Tensor
from app.core.model import ModelConfig, Node, Step, TensorSpec, capacity_of, reached, sequence_ids_of, takes_traceparent
from app.core.text import nearest
from app.steps.plan import SKIPPED, Plan, PlannedStep, Source, Values
from app.steps.steps_spec import ChosenSource, Condition, SourceSpec, StepSpec, names_of


@dataclass(slots=True)
class Planner:
    """``models``: those that steps call, and those below them."""

    specs: Mapping[str, StepSpec]
    models: Mapping[str, ModelConfig]
    fields: dict[str, TensorSpec] = field(default_factory=dict)
    """The parameters of the request, which conditions may read."""
    given: dict[str, TensorSpec] = field(default_factory=dict)
    """The tensors of the request."""
    constants: Values = field(default_factory=dict)
    streams: dict[str, frozenset[str]] = field(default_factory=dict)
    """By step, the decoupled steps whose responses it reads, itself or through others."""
    missing: dict[str, bool] = field(default_factory=dict)
    """By name, whether a tensor may be missing for another reason than the own condition of its step."""

    def step_of(self, source: str) -> str:
        """The step that writes a tensor; empty for a tensor or a field of the request."""
        step, dot, _ = source.partition(".")
        return step if dot and step in self.specs else ""

    # Tensors

    def config(self, step: str) -> ModelConfig:
        """Raises PipelineMismatch for a step that ends the pipeline."""
        model = self.specs[step].model
        if model is None:
            raise PipelineMismatch((), f"names '{step}', which ends the pipeline and has no outputs")
        return named(model, self.models, "a ready model")

    def written(self, source: str) -> TensorSpec | None:
        """The declared output of a step, for one item; None for a tensor or a field of the request."""
        step, dot, tensor = source.partition(".")
        if self.step_of(source):
            rows = (-1,) * (self.specs[step].each is not None)
            spec = tensor_named(self.config(step).outputs, tensor, ())
            return replace(spec, name=source, dims=(*rows, *spec.dims))
        if dot and source not in self.fields:
            text = f"names '{source}', and '{step}' is not a step{nearest(step, list(self.specs))}"
            raise PipelineMismatch((), text, "unknown-tensor")
        return None

    @staticmethod
    def check_fit(source: TensorSpec, target: TensorSpec) -> None:
        if source.is_typed and target.is_typed:
            if source.datatype != target.datatype:
                text = f"is {source.datatype}, and '{target.name}' is {target.datatype}"
                raise PipelineMismatch((), text, "datatype-mismatch")
            if not agree(source.dims, target.dims):
                shapes = f"{shape_text(source.dims)}, and '{target.name}' is {shape_text(target.dims)}"
                raise PipelineMismatch((), f"has the shape {shapes}", "shape-mismatch")

    def source(self, step: str, given: SourceSpec, wanted: TensorSpec) -> Source:
        if isinstance(given, ChosenSource) and given.value is not None:
            name = f"={step}.{wanted.name}"
            self.constants[name] = _constant(given.value, wanted)
            return Source((name,))
        rows = replace(wanted, dims=(-1, *wanted.dims)) if self.specs[step].each in names_of(given) else wanted
        for name in names_of(given):
            found = self.written(name)
            known = found or self.given.setdefault(name, replace(rows, name=name))
            self.check_fit(known, rows)
            if found is None and known.is_typed and rows.is_typed:
                sizes = tuple(map(max, known.dims, rows.dims))
                self.given[name] = replace(known, dims=sizes, optional=known.optional and rows.optional)
        return Source(names_of(given), isinstance(given, ChosenSource) and given.race is not None)

    def streams_of(self, sources: Iterable[str]) -> frozenset[str]:
        """The decoupled steps with whose responses these tensors come."""
        steps = filter(None, map(self.step_of, sources))
        found = [{each} if self.config(each).decoupled else self.streams[each] for each in steps]
        return frozenset[str]().union(*found)

    def check_race(self, source: Source) -> None:
        """Raises PipelineMismatch for a race with a stream, whose further responses would come after its end."""
        found = {self.streams_of([name]) for name in source.names}
        if source.is_race and len(found) > 1:
            first = min(frozenset[str]().union(*found))
            raise PipelineMismatch((), f"is a race with the responses of '{first}': use `first`")

    # Conditions

    def check_condition(self, condition: Condition, *, is_over: bool = False) -> None:
        """Raises PipelineMismatch for a condition that cannot be evaluated, or can never hold."""
        key, given = condition.only
        for each in condition.parts:
            self.check_condition(each, is_over=key in ("any", "all"))
        if condition.parts:
            if key == "all_of" and any(one.is_opposite_of(other) for one in given for other in given):
                raise PipelineMismatch((), "can never hold: a part of it is the opposite of another one")
            return
        (name,) = condition.names()
        spec = self.written(name) or named(name, self.fields | self.given, "a parameter or a tensor that a step reads")
        if not spec.is_typed:
            return
        if key == "empty" and -1 not in spec.dims:
            raise PipelineMismatch((), f"can never hold: '{name}' has the shape {shape_text(spec.dims)}")
        if key in ("empty", "not_empty"):
            return
        if not is_over and any(dim != 1 for dim in spec.dims):
            raise PipelineMismatch((), f"needs `any` or `all`: '{name}' has the shape {shape_text(spec.dims)}")
        for each in given[1] if key == "is_in" else given[1:]:
            is_wrong = isinstance(each, str) is not (spec.datatype == BYTES)
            is_wrong |= spec.datatype == "BOOL" and key in ("below", "at_least")
            if is_wrong or (spec.datatype in FLOAT_DATATYPES and type(each) is int and each >= 2**63):
                raise PipelineMismatch((), f"compares '{name}', which is {spec.datatype}, with {each!r}")
            if key in ("equals", "is_in"):
                _constant(each, replace(spec, dims=(1,)))

    # Steps

    def step(self, name: str, read: Set[str]) -> PlannedStep:
        """``read``: all names that anything reads. Call this for the steps that it reads from before."""
        spec = self.specs[name]
        plain = [each for each in spec.inputs.values() if isinstance(each, str)]
        together = self.streams_of([*plain, *(() if spec.when is None else spec.when.names())])
        if len(together) > 1:
            both = " and ".join(f"'{each}'" for each in sorted(together))
            raise PipelineMismatch(("inputs",), f"are of {both}, whose responses do not belong together")
        own = self.streams[name] = self.streams_of(spec.needs)
        for step in spec.after:
            named(step, self.specs, "a step", "after")
            if not self.streams[step] <= own:
                first = min(self.streams[step])
                text = f"names '{step}', which runs for each response of '{first}': name '{first}' instead"
                raise PipelineMismatch(("after",), text)
        if spec.model is None:
            return PlannedStep(name, spec, own)
        config = self.config(name)
        if config.decoupled and (spec.each or own):
            text = "can have no `each`" if spec.each else f"cannot follow '{min(own)}', which is decoupled too"
            raise PipelineMismatch(("model",), f"is decoupled, so it {text}")
        inputs = []
        for tensor, source in spec.inputs.items():
            with mismatch_at("inputs", tensor):
                wanted = tensor_named(config.inputs, tensor, ())
                inputs.append((wanted, self.source(name, source, wanted)))
                self.check_race(inputs[-1][1])
        for wanted in config.inputs:
            if wanted.name not in spec.inputs and not wanted.optional:
                text = f"do not have '{wanted.name}', which the model requires"
                raise PipelineMismatch(("inputs",), text, "unmapped-input")
        below = {each.name: each for each in reached(config, self.models)}
        if sequence_ids_of(config, below).needed_by:
            raise PipelineMismatch(("model",), "needs the id of a sequence, which steps do not send")
        outputs = {written: each for each in config.outputs if (written := f"{name}.{each.name}") in read}
        capacity, is_traced = capacity_of(config, below), takes_traceparent(config, below)
        return PlannedStep(name, spec, own, config, inputs, outputs, capacity, is_traced)

    # Outputs that may be missing

    def note_missing(self, step: PlannedStep) -> None:
        """Call this for all steps that it reads from before."""
        needed = (source for tensor, source in step.inputs if not tensor.optional or step.spec.each in source.names)
        is_at_risk, omitted = step.spec.optional or any(map(self.may_miss, needed)), step.config.names_in("may_omit")
        for each in step.config.outputs:
            self.missing[f"{step.name}.{each.name}"] = is_at_risk or each.name in omitted

    def may_miss(self, source: Source) -> bool:
        if not all(map(self._may_miss, source.names)):
            return False
        whens = [self.specs[self.step_of(name)].when for name in source.names if not self.missing[name]]
        opposite = [one for one in whens for other in whens if one and other and one.is_opposite_of(other)]
        return not opposite or any(self._may_miss(name) for each in opposite for name in each.names())

    def _may_miss(self, name: str) -> bool:
        return self.missing.get(name, False) or bool((step := self.step_of(name)) and self.specs[step].when)

    # The plan

    def answer(self, source: Source) -> TensorSpec:
        """An output of the pipeline. Raises PipelineMismatch."""
        found = [spec for each in source.names if (spec := self.written(each)) is not None]
        if len(found) < len(source.names):
            raise PipelineMismatch((), f"names '{source.text}', which is not an output of a step")
        self.check_race(source)
        for each in found:
            self.check_fit(each, found[0])
        return replace(found[0], name=source.text, optional=self.may_miss(source))

    def planned(self, name: str, outputs: Mapping[Source, Location] | None = None, further: Iterable[str] = ()) -> Plan:
        """Raises PipelineMismatch with the key below the pipeline.

        ``outputs``: with their keys; None for all that no step reads. ``further``: also read, if a step writes them.
        """
        specs = self.specs
        with mismatch_at("steps"):
            before = {key: {*specs[key].after, *map(self.step_of, specs[key].needs)} & specs.keys() for key in specs}
            order, needed = _ordered(before), {each for spec in specs.values() for each in spec.needs}
            names = [f"{step}.{each.name}" for step in specs if specs[step].model for each in self.config(step).outputs]
            if outputs is None:
                outputs = {Source((each,)): () for each in names if each not in needed}
            outputs = {**outputs, **{Source((each,)): () for each in further if each in names}, **outputs}
            read = needed | {each for source in outputs for each in source.names}
            steps = {}
            for each in order:
                with mismatch_at(each):
                    steps[each] = self.step(each, read)
            self.missing = {each: spec_of.optional for each, spec_of in (self.fields | self.given).items()}
            for each in order:
                self.note_missing(steps[each])
                if (condition := specs[each].when) is not None:
                    with mismatch_at(each, "when"):
                        self.check_condition(condition)
        answered = []
        for source, place in outputs.items():
            with mismatch_at(*place):
                answered.append(self.answer(source))
        of_stream = {each: {*steps[each].outputs} for each in order if steps[each].config.decoupled}
        waits = {each: {*specs[each].after} for each in order}
        for each in order:  # a stream starts when what runs once, and is read behind it, is there
            for stream in self.streams[each]:
                waits[stream] |= {other for other in before[each] if not self.streams[other]} - of_stream.keys()
                of_stream[stream] |= steps[each].outputs.keys()
        with mismatch_at("steps"):
            order = _ordered({each: before[each] | waits[each] for each in order})
        steps = {each: replace(steps[each], after=frozenset(waits[each])) for each in order}
        reads = [(each.name, source) for each in steps.values() for _, source in each.inputs]
        reads += [(each, Source((name,))) for each, spec in specs.items() if spec.when for name in spec.when.names()]
        reads += [("", source) for source in outputs]
        races = dict.fromkeys(each for _, each in reads if each.is_race)
        readers = {step: [each for each in reads if step in map(self.step_of, each[1].names)] for step in order}
        has_optional = any(each.optional for each in specs.values())
        return Plan(
            name=name,
            backend="steps",
            max_batch_size=0,
            inputs=tuple(self.given.values()),
            outputs=(*answered, *([TensorSpec(SKIPPED, BYTES, (-1,))] if has_optional else ())),
            decoupled=bool(of_stream),
            together=tuple(
                frozenset(each.text for each in outputs if not names.isdisjoint(each.names))
                for names in of_stream.values()
            ),
            steps=tuple(_shown(each, outputs) for each in steps.values() if each.spec.model is not None),
            order=tuple(steps.values()),
            fields=self.fields,
            defaults=dict.fromkeys([*self.fields, *self.given]) | self.constants,
            answers={source.text: source for source in outputs},
            races={each: {name: _ended(each, self.step_of(name), readers) for name in each.names} for each in races},
            of_stream=of_stream,
            read_by={step: {step, *(reader for reader, _ in found)} for step, found in readers.items()},
            reports_skipped=has_optional,
        )


def _ordered(before: Mapping[str, Set[str]]) -> list[str]:
    """The steps, each behind those that it waits for. Raises PipelineMismatch for a circle."""
    for cycle in cycles(before):
        circle = " waits for ".join(f"'{each}'" for each in (*cycle, cycle[0]))
        raise PipelineMismatch((cycle[0],), f"is in a circle: {circle}", "cycle")
    order = list[str]()
    while len(order) < len(before):
        order += [each for each in before if each not in order and before[each] <= {*order}]
    return order


def cycles(edges: Mapping[Node, Iterable[Node]]) -> Iterator[list[Node]]:
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


def _constant(value: Any, wanted: TensorSpec) -> Tensor:
    """Raises PipelineMismatch for a value that is not of the input's type and shape."""
    is_text = wanted.datatype == BYTES
    types: dict[str, Any] = {BYTES: str, "BOOL": bool | Literal[0, 1]}
    element = types.get(wanted.datatype) or number_type(wanted.datatype, ANY_NUMBER)
    nested: Any = reduce(lambda inner, _: list[inner], wanted.dims, element)  # type: ignore[valid-type]
    try:
        value = converted(value, nested | element, "value")
        array = to_array_of("text" if is_text else "number", wanted.datatype)(value)
    except ValueError as exc:
        raise PipelineMismatch((), f"is not a value of {wanted.datatype} {shape_text(wanted.dims)}") from exc
    array = array if array.ndim else array.reshape((1,) * len(wanted.dims))
    if not agree(array.shape, wanted.dims):
        raise PipelineMismatch((), f"has the shape {shape_text(array.shape)}; expected {shape_text(wanted.dims)}")
    return Tensor(wanted.name, wanted.datatype, array)


def _shown(step: PlannedStep, answered: Iterable[Source]) -> Step:
    inputs = tuple((tensor.name, each) for tensor, source in step.inputs for each in source.names if each[0] != "=")
    outputs = [(tensor.name, name) for name, tensor in step.outputs.items()]
    outputs += [(tensor, each.text) for tensor, name in outputs for each in answered if name in each.names]
    return Step(step.config.name, step.spec.version, inputs, tuple(dict.fromkeys(outputs)), step.name)


def _ended(race: Source, winner: str, readers: Mapping[str, Sequence[tuple[str, Source]]]) -> frozenset[str]:
    """The steps that nothing needs any more: only this race, or steps that nothing needs, read their outputs."""
    ended = set[str]()
    while True:
        found = {
            step
            for step, reads in readers.items()
            if step != winner and reads and all(source == race or reader in ended for reader, source in reads)
        }
        if found <= ended:
            return frozenset(ended)
        ended |= found
