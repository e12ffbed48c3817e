"""What is known of a pipeline's steps before they run: the plan that travels with each request of the pipeline.

Steps work on one item: the dimensions of their tensors have no batch dimension, whether their models have one or not.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from app.core.engine import PipelineLayer
from app.core.inference import (
    BYTES,
    Array,
    Extension,
    InferenceRequest,
    Parameter,
    StepTimes,
    Tensor,
    bytes_array,
)
from app.core.model import Capacity, ModelConfig, TensorSpec
from app.steps.steps_spec import Condition, StepSpec

SKIPPED = "skipped"
"""The output with the names of the optional steps that failed or came too late."""

PENDING: Literal["pending"] = "pending"
"""Stands for a tensor, or for the result of a condition, that is not known yet."""

Found = Tensor | Literal["pending"] | None
"""None: the tensor was not written, and never will be."""
Verdict = bool | Literal["pending"] | None
"""None: a tensor that the condition needs was not written."""
Values = dict[str, Tensor | None]
"""By name of a tensor or a field. What is not there yet is left out."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from: the first of these names that is written; of a race, the first in time."""

    names: tuple[str, ...]
    is_race: bool = False

    @property
    def text(self) -> str:
        return " or ".join(self.names)

    def look(self, values: Values) -> Found:
        is_known = True
        for name in (self.text, *self.names) if self.is_race and self.text in values else self.names:
            found = values.get(name, PENDING)
            if found == PENDING:
                if not self.is_race:
                    return PENDING
                is_known = False
            elif found is not None:
                return found
        return None if is_known else PENDING


@dataclass(frozen=True, slots=True)
class PlannedInput:
    tensor: TensorSpec
    source: Source


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """``spec.model`` None: the end of the pipeline, with the reason ``spec.exit``."""

    name: str
    spec: StepSpec
    config: ModelConfig | None = None
    inputs: tuple[PlannedInput, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    """Those that a step, a condition or the answer reads."""
    after: tuple[str, ...] = ()
    capacity: Capacity = field(default_factory=Capacity)
    takes_traceparent: bool = False
    streams: frozenset[str] = frozenset()
    """The decoupled steps for whose responses the step runs; empty if it runs once."""

    def verdict(self, values: Values, done: set[str]) -> Verdict:
        """Whether the step runs; False if it is skipped."""
        result = True if self.spec.when is None else verdict_of(self.spec.when, values)
        if result is None or result is False:
            return False
        is_pending = result == PENDING
        for each in self.inputs:
            found = each.source.look(values)
            if found is None and (not each.tensor.optional or self.spec.each in each.source.names):
                return False
            is_pending = is_pending or found == PENDING
        return PENDING if is_pending or not done.issuperset(self.after) else True


@dataclass(frozen=True, slots=True)
class Race:
    source: Source
    rivals: Mapping[str, frozenset[str]]
    """Name of a tensor -> the steps that nothing needs any more if it wins."""


class Plan(Extension, eq=False):
    """The steps of a pipeline, and what it answers. Travels with each request of the pipeline."""

    name: str
    steps: tuple[PlannedStep, ...]
    defaults: Values
    """The constants; None for what a request may leave out."""
    outputs: Mapping[str, Source]
    """By name of the pipeline's tensor."""
    races: tuple[Race, ...] = ()
    of_stream: Mapping[str, frozenset[str]] = {}
    """Decoupled step -> the names of the tensors that come anew with each of its responses."""
    reports_skipped: bool = False
    read_by: Mapping[str, Set[str]] = {}
    """Step -> itself and the steps that wait for it. Without those whose outputs are answered."""

    @property
    def unread(self) -> list[str]:
        """The steps whose outputs nothing reads."""
        return [each.name for each in self.steps if each.config is not None and not each.outputs]


@dataclass(frozen=True)
class StepsLayer(PipelineLayer):
    plan: Plan

    def extended(self, request: InferenceRequest) -> InferenceRequest:
        return request.extended(self.plan).extended(StepTimes())


def array_of(value: Parameter) -> Tensor:
    """A field's value as a tensor of one element."""
    if isinstance(value, str):
        return Tensor("", BYTES, bytes_array([value.encode()], (1,)))
    return Tensor("", "", np.asarray([value]))


def _wanted(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


_COMPARISONS: Mapping[str, Callable[[Array, Any], Any]] = {
    "empty": lambda array, _: not array.size,
    "not_empty": lambda array, _: array.size,
    "equals": lambda array, value: array == _wanted(value),
    "is_in": lambda array, values: np.any([array == _wanted(value) for value in values], axis=0),
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
