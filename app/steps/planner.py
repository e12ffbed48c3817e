"""Compiles the steps of a pipeline for the models that they call.

Finds unknown tensors, types and shapes that do not fit, circles, conditions that can never hold, and outputs that may
be missing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from app.codecs.kinds import agree, shape_text
from app.config.document import Location
from app.config.mismatch import PipelineMismatch, mismatch_at, named, tensor_named
from app.core.inference import BYTES, DTYPE_BY_DATATYPE, FLOAT_DATATYPES, Tensor, bytes_array
from app.core.model import ModelConfig, Step, TensorSpec, capacity_of, reached, sequence_ids_of, takes_traceparent
from app.core.text import nearest
from app.steps.plan import SKIPPED, Plan, PlannedInput, PlannedStep, Race, Source, Values
from app.steps.steps_spec import ChosenSource, Condition, SourceSpec, StepSpec, names_of, step_of


@dataclass(slots=True)
class _Planner:
    """``fields``: the parameters that conditions may read, by name."""

    specs: Mapping[str, StepSpec]
    models: Mapping[str, ModelConfig]
    fields: Mapping[str, TensorSpec]
    given: dict[str, TensorSpec] = field(default_factory=dict)
    """The tensors of the request."""
    constants: Values = field(default_factory=dict)
    missing: dict[tuple[str, bool], bool] = field(default_factory=dict)
    """The results of :meth:`_may_miss`."""

    # Order

    def before(self, name: str) -> set[str]:
        """The steps that a step needs or waits for. Raises PipelineMismatch for an unknown one."""
        spec = self.specs[name]
        for step in spec.after:
            with mismatch_at(name):
                named(step, self.specs, "a step", "after")
        found = (step_of(source, self.specs) for source in spec.needs)
        return {*spec.after, *(each[0] for each in found if each is not None)}

    # Tensors

    def config(self, step: str) -> ModelConfig:
        """Raises PipelineMismatch for a step that ends the pipeline."""
        model = self.specs[step].model
        if model is None:
            raise PipelineMismatch((), f"names '{step}', which ends the pipeline and has no outputs")
        return named(model, self.models, "a ready model")

    def written(self, source: str) -> TensorSpec | None:
        """The declared output of a step, for one item; None for a tensor or a field of the request."""
        found = step_of(source, self.specs)
        if found is None:
            if "." in source and source not in self.fields:
                step = source.partition(".")[0]
                text = f"names '{source}', and '{step}' is not a step{nearest(step, list(self.specs))}"
                raise PipelineMismatch((), text, "unknown-tensor")
            return None
        step, tensor = found
        spec = tensor_named(self.config(step).outputs, tensor, ())
        return (
            replace(spec, name=source, dims=(-1, *spec.dims)) if self.specs[step].each else replace(spec, name=source)
        )

    def give(self, source: str, wanted: TensorSpec) -> TensorSpec:
        """Notes that a step reads a tensor of the request. Raises PipelineMismatch if another step does otherwise."""
        known = self.given.setdefault(source, replace(wanted, name=source))
        if known.is_typed and wanted.is_typed:
            self.check_fit(known, wanted)
            sizes = tuple(max(a, b) for a, b in zip(known.dims, wanted.dims, strict=True))
            self.given[source] = known = replace(known, dims=sizes, optional=known.optional and wanted.optional)
        return known

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
        each = self.specs[step].each
        rows = replace(wanted, dims=(-1, *wanted.dims)) if each in names_of(given) else wanted
        for name in names_of(given):
            found = self.written(name)
            if found is None:
                self.give(name, rows)
            else:
                self.check_fit(found, rows)
        return Source(names_of(given), isinstance(given, ChosenSource) and given.race is not None)

    def check_race(self, source: Source, streams: Mapping[str, Set[str]]) -> None:
        """Raises PipelineMismatch for a race with a stream, whose further responses would come after its end."""
        steps = [each[0] for name in source.names if (each := step_of(name, self.specs)) is not None]
        found = {frozenset({each} if self.config(each).decoupled else streams[each]) for each in steps}
        if source.is_race and len(found | ({frozenset()} if len(steps) < len(source.names) else set())) > 1:
            raise PipelineMismatch(
                (), f"is a race with the responses of '{min(set[str]().union(*found))}': use `first`"
            )

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
        spec = self.written(name) or self.given.get(name) or self.fields.get(name)
        if spec is None:
            text = f"names '{name}', which is neither a parameter nor a tensor that a step reads"
            raise PipelineMismatch((), f"{text}{nearest(name, [*self.given, *self.fields])}")
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

    def step(self, name: str, streams: Mapping[str, Set[str]], read: Set[str]) -> PlannedStep:
        """``streams``: by step, the decoupled steps that it reads from. ``read``: all names that anything reads."""
        spec = self.specs[name]
        own = frozenset(streams[name])
        for step in spec.after:
            if not streams[step] <= own:
                first = min(streams[step])
                text = f"names '{step}', which runs for each response of '{first}': name '{first}' instead"
                raise PipelineMismatch(("after",), text)
        if spec.model is None:
            return PlannedStep(name, spec, after=tuple(spec.after), streams=own)
        config = self.config(name)
        if config.decoupled and (spec.each or own):
            text = "can have no `each`" if spec.each else f"cannot follow '{min(own)}', which is decoupled too"
            raise PipelineMismatch(("model",), f"is decoupled, so it {text}")
        inputs = []
        for tensor, source in spec.inputs.items():
            with mismatch_at("inputs", tensor):
                wanted = tensor_named(config.inputs, tensor, ())
                inputs.append(PlannedInput(wanted, self.source(name, source, wanted)))
                self.check_race(inputs[-1].source, streams)
        for wanted in config.inputs:
            if wanted.name not in spec.inputs and not wanted.optional:
                text = f"do not have '{wanted.name}', which the model requires"
                raise PipelineMismatch(("inputs",), text, "unmapped-input")
        below = {each.name: each for each in reached(config, self.models)}
        if sequence_ids_of(config, below).needed_by:
            raise PipelineMismatch(("model",), "needs the id of a sequence, which steps do not send")
        return PlannedStep(
            name,
            spec,
            config,
            tuple(inputs),
            tuple(each for each in config.outputs if f"{name}.{each.name}" in read),
            tuple(spec.after),
            capacity_of(config, below),
            takes_traceparent(config, below),
            own,
        )

    def streams(self, order: Iterable[str]) -> dict[str, set[str]]:
        """By step, the decoupled steps whose responses it reads, itself or through others. Raises PipelineMismatch."""
        found: dict[str, set[str]] = {}
        for name in order:
            plain: set[str] = set()
            found[name] = set()
            spec = self.specs[name]
            for given in (*spec.inputs.values(), *(() if spec.when is None else spec.when.names())):
                of_source: set[str] = set()
                for source in names_of(given):
                    with mismatch_at(name):
                        place = step_of(source, self.specs)
                        if place is not None and self.config(place[0]).decoupled:
                            of_source.add(place[0])
                        elif place is not None:
                            of_source |= found[place[0]]
                found[name] |= of_source
                plain |= of_source if isinstance(given, str) else set()
            if len(plain) > 1:
                both = " and ".join(f"'{each}'" for each in sorted(plain))
                raise PipelineMismatch((name, "inputs"), f"are of {both}, whose responses do not belong together")
        return found

    # Outputs that may be missing

    def may_miss(self, source: Source) -> bool:
        if not all(map(self._may_miss, source.names)):
            return False
        whens = [self.specs[place[0]].when for name in source.names if (place := step_of(name, self.specs))]
        is_only_when = not any(self._may_miss(name, but_when=True) for name in source.names)
        opposite = [one for one in whens if one and any(other and one.is_opposite_of(other) for other in whens)]
        reads = {name for each in opposite for name in each.names()}
        return not (is_only_when and opposite) or any(map(self._may_miss, reads))

    def _may_miss(self, name: str, *, but_when: bool = False) -> bool:
        """``but_when``: for other reasons than the step's own condition."""
        if (name, but_when) not in self.missing:  # a tensor may be on many ways to an output
            self.missing[name, but_when] = self._finds_missing(name, but_when=but_when)
        return self.missing[name, but_when]

    def _finds_missing(self, name: str, *, but_when: bool) -> bool:
        place = step_of(name, self.specs)
        if place is None:
            given = self.given.get(name) or self.fields.get(name)
            return given is not None and given.optional
        spec, config = self.specs[place[0]], self.config(place[0])
        if spec.optional or (spec.when is not None and not but_when) or place[1] in config.names_in("may_omit"):
            return True
        optional = {each.name for each in config.inputs if each.optional}
        needed = [
            Source(names)
            for tensor, given in spec.inputs.items()
            if (names := names_of(given)) and (tensor not in optional or spec.each in names)
        ]
        return any(map(self.may_miss, needed))


def _ordered(before: Mapping[str, Set[str]]) -> list[str]:
    """The steps, each behind those that it waits for. Raises PipelineMismatch for a circle."""
    order, left = list[str](), dict(before)
    while left:
        ready = [name for name in left if not left[name] & left.keys()]
        if not ready:
            name, path = next(iter(left)), list[str]()
            while name not in path:
                path.append(name)
                name = min(left[name] & left.keys())
            circle = " waits for ".join(f"'{each}'" for each in [*path[path.index(name) :], name])
            raise PipelineMismatch((name,), f"is in a circle: {circle}", "cycle")
        order += ready
        for name in ready:
            del left[name]
    return order


def _constant(value: Any, wanted: TensorSpec) -> Tensor:
    """Raises PipelineMismatch for a value that is not of the input's type and shape."""
    dims = tuple(1 if dim == -1 else dim for dim in wanted.dims)
    try:
        is_text = wanted.datatype == BYTES
        given = np.asarray(value, object if is_text else None)
        if not all(isinstance(each, str) for each in given.flat) if is_text else given.dtype.kind not in "biuf":
            raise ValueError
        if is_text:
            array = bytes_array([each.encode() for each in given.flat], given.shape)
        else:
            with np.errstate(over="raise", invalid="raise"):
                array = given.astype(DTYPE_BY_DATATYPE[wanted.datatype])
            if wanted.datatype not in FLOAT_DATATYPES and not np.array_equal(array, given):
                raise ValueError
        array = array.reshape(dims) if array.ndim == 0 else array
    except (TypeError, ValueError, ArithmeticError) as exc:
        raise PipelineMismatch((), f"is not a value of {wanted.datatype} {shape_text(wanted.dims)}") from exc
    if not agree(array.shape, wanted.dims):
        raise PipelineMismatch((), f"has the shape {shape_text(array.shape)}; expected {shape_text(wanted.dims)}")
    return Tensor(wanted.name, wanted.datatype, array)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a pipeline declares. ``outputs``: None for all that no step reads. ``fields``: its request parameters."""

    steps: Mapping[str, StepSpec]
    outputs: Sequence[Source] | None = None
    further: Sequence[Source] = ()
    """Outputs that are read, for a contract or a count, but not answered."""
    fields: Sequence[TensorSpec] = ()
    places: Mapping[Source, Location] = field(default_factory=dict)
    """The keys below the pipeline that name these outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsModel(ModelConfig):
    """The steps of a pipeline as one model. ``plan``: of its requests."""

    plan: Plan


def planned(name: str, declared: Declaration, models: Mapping[str, ModelConfig]) -> StepsModel:
    """The steps as one model, which a pipeline runs like any other.

    ``models``: those that steps call, and those below them. Raises PipelineMismatch with the key below the pipeline.
    """
    specs, outputs = declared.steps, declared.outputs
    planner = _Planner(specs, models, {each.name: each for each in declared.fields})
    with mismatch_at("steps"):
        before = {each: planner.before(each) for each in specs}
        order = _ordered(before)
        streams = planner.streams(order)
        needed = {each for spec in specs.values() for each in spec.needs}
        if outputs is None:
            leaves = [
                f"{step}.{each.name}" for step in specs if specs[step].model for each in planner.config(step).outputs
            ]
            outputs = [Source((each,)) for each in leaves if each not in needed]
        outputs = list(dict.fromkeys([*outputs, *declared.further]))
        read = needed | {each for source in outputs for each in source.names}
        steps = []
        for each in order:
            with mismatch_at(each):
                steps.append(planner.step(each, streams, read))
        for each in order:
            if (condition := specs[each].when) is not None:
                with mismatch_at(each, "when"):
                    planner.check_condition(condition)
    answered = []
    for source in outputs:
        with mismatch_at(*declared.places.get(source, ())):
            specs_of = [planner.written(each) for each in source.names]
            if None in specs_of:
                raise PipelineMismatch((), f"names '{source.text}', which is not an output of a step")
            first, *others = [each for each in specs_of if each is not None]
            planner.check_race(source, streams)
            for other in others:
                planner.check_fit(other, first)
            answered.append(replace(first, name=source.text, optional=planner.may_miss(source)))
    decoupled = {each.name for each in steps if each.config is not None and each.config.decoupled}
    # A stream starts when what runs once, and is read behind it, is there.
    behind = {
        stream: {each for step in specs if stream in streams[step] for each in before[step] if not streams[each]}
        for stream in decoupled
    }
    waits = {each.name: {*each.after, *behind.get(each.name, set()) - decoupled} for each in steps}
    with mismatch_at("steps"):
        _ordered({each: before[each] | waits[each] for each in order})
    steps = [replace(each, after=tuple(waits[each.name])) for each in steps]
    has_optional = any(each.optional for each in specs.values())
    plan = Plan(
        name=name,
        steps=tuple(steps),
        defaults=dict.fromkeys([*planner.fields, *planner.given]) | planner.constants,
        outputs={each.name: source for each, source in zip(answered, outputs, strict=True)},
        races=tuple(_races(steps, outputs, before)),
        of_stream={
            stream: frozenset(_names_of(steps, {stream, *(s for s in specs if stream in streams[s])}))
            for stream in decoupled
        },
        reports_skipped=has_optional,
        read_by={
            name: {name, *(each for each in specs if name in before[each])}
            for name in specs.keys() - {each.partition(".")[0] for source in outputs for each in source.names}
        },
    )
    return StepsModel(
        name=name,
        backend="steps",
        max_batch_size=0,
        inputs=tuple(planner.given.values()),
        outputs=(*answered, *([TensorSpec(SKIPPED, BYTES, (-1,))] if has_optional else ())),
        decoupled=bool(decoupled),
        steps=tuple(_shown(each, outputs) for each in steps if each.config is not None),
        plan=plan,
    )


def _shown(step: PlannedStep, answered: Sequence[Source]) -> Step:
    assert step.config is not None
    inputs = ((each.tensor.name, name) for each in step.inputs for name in each.source.names)
    outputs = [(each.name, f"{step.name}.{each.name}") for each in step.outputs]
    outputs += [(tensor, each.text) for tensor, name in outputs for each in answered if name in each.names]
    sources = tuple(each for each in inputs if each[1][0] != "=")
    return Step(step.config.name, step.spec.version, sources, tuple(dict.fromkeys(outputs)), step.name)


def _names_of(steps: Iterable[PlannedStep], wanted: Set[str]) -> Iterator[str]:
    """The names of all outputs of these steps."""
    return (f"{step.name}.{each.name}" for step in steps if step.name in wanted for each in step.outputs)


def _races(steps: Sequence[PlannedStep], outputs: Sequence[Source], before: Mapping[str, Set[str]]) -> Iterator[Race]:
    sources = [*(each.source for step in steps for each in step.inputs), *outputs]
    tested = {name for step in steps if step.spec.when is not None for name in step.spec.when.names()}
    answered = {name.partition(".")[0] for each in outputs for name in each.names}
    for race in {each for each in sources if each.is_race}:
        others = {name for each in sources if each != race for name in each.names} | tested
        rivals = {}
        for winner in race.names:
            ended = set[str]()
            for step in {name.partition(".")[0] for name in race.names} - {winner.partition(".")[0]}:
                own = set(_names_of(steps, {step}))
                ended |= {step} if own <= set(race.names) and not own & others else set()
            size = -1
            while len(ended) > size:  # also the steps that only they need
                size = len(ended)
                needed = {each for name in ended for each in before.get(name, ())} - answered
                ended |= {each for each in needed if all(s in ended for s in before if each in before[s])}
            rivals[winner] = frozenset(ended)
        yield Race(race, rivals)
