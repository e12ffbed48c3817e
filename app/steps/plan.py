"""What is known of a pipeline's steps before they run: the plan that travels with each request of the pipeline.

Steps work on one item: the dimensions of their tensors have no batch dimension, whether their models have one or not.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from app.core.engine import PipelineLayer
from app.core.errors import InvalidInput, UnknownModel
from app.core.inference import BYTES, Array, InferenceRequest, Parameter, StepTimes, Tensor
from app.core.model import Capacity, ModelConfig, TensorSpec
from app.steps.steps_spec import Condition, StepSpec

VERSION = "1"
VERSIONS = ("", VERSION)
"""Of the model that the steps of a pipeline are."""
SKIPPED = "skipped"
"""The output with the names of the optional steps that failed or came too late."""

PENDING: Literal["pending"] = "pending"
"""Stands for a tensor, or for the result of a condition, that is not known yet."""

Verdict = bool | Literal["pending"] | None
"""None: a tensor that the condition needs was not written."""
Values = dict[str, Tensor | None]
"""By name of a tensor or a field. What is not there yet is left out."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from: the first of these names that is written.

    A race is settled once, by the first in time: then the value has the name of the race.
    """

    names: tuple[str, ...]
    is_race: bool = False

    @property
    def text(self) -> str:
        return " or ".join(self.names)

    def look(self, values: Values) -> Tensor | Literal["pending"] | None:
        """None: the tensor was not written, and never will be."""
        for name in (self.text,) if self.is_race else self.names:
            found = values.get(name, PENDING)
            if found is not None:
                return found
        return None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """``spec.model`` None: the end of the pipeline, with the reason ``spec.exit``."""

    name: str
    spec: StepSpec
    streams: frozenset[str]
    """The decoupled steps for whose responses the step runs; empty if it runs once."""
    config: ModelConfig = field(default=ModelConfig("", "", 0, (), ()))
    inputs: Sequence[tuple[TensorSpec, Source]] = ()
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    """By name of the pipeline: those that a step, a condition or the answer reads."""
    capacity: Capacity = field(default_factory=Capacity)
    takes_traceparent: bool = False
    after: frozenset[str] = frozenset()

    def verdict(self, values: Values, done: set[str]) -> Verdict:
        """Whether the step runs; False if it is skipped."""
        result = True if self.spec.when is None else verdict_of(self.spec.when, values)
        if result is None or result is False:
            return False
        is_pending = result == PENDING
        for tensor, source in self.inputs:
            found = source.look(values)
            if found is None and (not tensor.optional or self.spec.each in source.names):
                return False
            is_pending = is_pending or found == PENDING
        return PENDING if is_pending or not done.issuperset(self.after) else True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(ModelConfig, PipelineLayer):
    """The steps of a pipeline: as one model, which a pipeline runs like any other, and as the layer that runs them."""

    order: tuple[PlannedStep, ...]
    """Each behind those that it waits for."""
    fields: Mapping[str, TensorSpec]
    """The parameters that conditions may read."""
    defaults: Values
    """The constants, and what stands for a field that a request leaves out; None if nothing does."""
    answers: Mapping[str, Source]
    """By name of the pipeline's tensor."""
    races: Mapping[Source, Mapping[str, frozenset[str]]]
    """By race and the name of its winner, the steps that nothing needs any more."""
    of_stream: Mapping[str, Set[str]]
    """Decoupled step -> the names of the tensors that come anew with each of its responses."""
    read_by: Mapping[str, Set[str]]
    """Step -> itself and the steps that read its outputs; an empty name if the answer has one."""
    reports_skipped: bool

    def check(self, request: InferenceRequest) -> None:
        if request.version not in VERSIONS:
            raise UnknownModel.named(request.model, request.version)
        if any(each.classification for each in request.outputs):
            raise InvalidInput(f"class result not available: the outputs of '{request.model}' are those of steps.")
        for name, spec in self.fields.items():
            value = request.parameters.get(name)
            is_needed = not spec.optional and self.defaults[name] is None
            if is_needed if value is None else type(value) not in _TYPES[spec.datatype]:
                raise InvalidInput(f"parameter '{name}' of '{request.model}' must be of the type {spec.datatype}.")

    def extended(self, request: InferenceRequest) -> InferenceRequest:
        return request.extended(StepTimes(plan=self))


_TYPES = {"INT64": (int,), "FP64": (int, float), BYTES: (str,), "BOOL": (bool,)}


def tensor_of(name: str, value: Parameter) -> Tensor:
    """A field's value as a tensor of one element."""
    return Tensor(name, "", np.asarray([encoded(value)], object if isinstance(value, str) else None))


def encoded(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


_COMPARISONS: Mapping[str, Callable[[Array, Any], Any]] = {
    "empty": lambda array, _: not array.size,
    "not_empty": lambda array, _: array.size,
    "equals": lambda array, value: array == encoded(value),
    "is_in": lambda array, values: np.any([array == encoded(value) for value in values], axis=0),
    "below": lambda array, value: ~(array >= value),  # also NaN: one of `below` and `at_least` always holds
    "at_least": lambda array, value: array >= value,
}
_WEIGHTS: Mapping[str, tuple[Verdict, ...]] = {
    "any_of": (False, None, PENDING, True),
    "all_of": (True, None, PENDING, False),
}
"""The result is the last of these that a part has."""


def verdict_of(condition: Condition, values: Values, over: Callable[[Any], Any] = np.all) -> Verdict:
    """``over``: joins the results of several elements."""
    key, given = condition.only
    if key in _WEIGHTS:
        return max((verdict_of(each, values) for each in given), key=_WEIGHTS[key].index)
    if key in ("any", "all"):
        return verdict_of(given, values, np.any if key == "any" else np.all)
    if key == "negated":
        result = verdict_of(given, values)
        return not result if isinstance(result, bool) else result
    name, wanted = (given, None) if isinstance(given, str) else given
    found = values.get(name, PENDING)
    if not isinstance(found, Tensor):
        return found
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(over(_COMPARISONS[key](found.array, wanted)))
