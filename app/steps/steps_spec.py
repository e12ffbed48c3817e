"""The key ``steps`` of a pipeline in ``gateway.yaml``: calls of models, their sources and their conditions."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Optional

from pydantic import Field

from app.config.document import JsonValue, Seconds, Section

StepName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
Reason = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Several = Annotated[list[Annotated[str, Field(pattern="^[^=]")]], Field(min_length=2, max_length=16)]
Comparison = Annotated[list[JsonValue], Field(min_length=2, max_length=2)]
"""The name of a tensor or a field, and the value to compare with."""


class ChosenSource(Section):
    """A source that is not one tensor. ``first``: in this order. ``race``: in the order of time."""

    first: Several | None = None
    race: Several | None = None
    value: JsonValue = None
    """The same for every request."""

    def faults(self) -> Iterator[str]:
        if sum(each is not None for each in (self.first, self.race, self.value)) != 1:
            yield "needs exactly one of first, race and value"


SourceSpec = Annotated[str, Field(pattern="^[^=]")] | ChosenSource
"""No name starts with ``=``: constants have these names."""


def names_of(source: SourceSpec) -> tuple[str, ...]:
    """The tensors and fields of a source, in their order; none for a value."""
    return (source,) if isinstance(source, str) else tuple(source.first or source.race or ())


class Condition(Section):
    """Exactly one key. A comparison with several elements needs ``any`` or ``all`` around it."""

    empty: str | None = None
    not_empty: str | None = None
    equals: Comparison | None = None
    is_in: Comparison | None = Field(default=None, alias="in")
    below: Comparison | None = None
    at_least: Comparison | None = None
    any: Optional["Condition"] = None
    all: Optional["Condition"] = None
    any_of: Annotated[list["Condition"], Field(min_length=1)] | None = None
    all_of: Annotated[list["Condition"], Field(min_length=1)] | None = None
    negated: Optional["Condition"] = Field(default=None, alias="not")

    @property
    def only(self) -> tuple[str, Any]:
        """Its key, as the name of the attribute, and the value of the key."""
        (key,) = self.model_fields_set
        return key, getattr(self, key)

    @property
    def parts(self) -> Sequence["Condition"]:
        """The conditions in it."""
        key, given = self.only
        return given if key in ("any_of", "all_of") else [given] if isinstance(given, Condition) else []

    def names(self) -> Iterator[str]:
        """The tensors and fields that it needs."""
        given = self.only[1]
        if not self.parts:
            yield given if isinstance(given, str) else given[0]
        yield from chain.from_iterable(each.names() for each in self.parts)

    def is_opposite_of(self, other: "Condition") -> bool:
        """Whether exactly one of both holds, as far as that is plain."""
        (key, given), (other_key, other_given) = self.only, other.only
        is_pair = {key, other_key} in ({"below", "at_least"}, {"empty", "not_empty"})
        return (is_pair and given == other_given) or self.negated == other or other.negated == self

    def faults(self) -> Iterator[str]:
        if len(self.model_fields_set) != 1 or self.only[1] is None:
            yield "needs exactly one key, such as empty, equals or any_of"
        key, given = self.only
        if key in ("any", "all") and given.only[0] not in ("equals", "is_in", "below", "at_least"):
            yield "has any or all, which only equals, in, below and at_least can have"
        name, value = given if key in ("equals", "is_in", "below", "at_least") else ("", None)
        if not isinstance(name, str):
            yield f"has {key.removeprefix('is_')}, which needs the name of a tensor or a field first, then the value"
        if key in ("below", "at_least") and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"has {key} with a value that is not a number"
        if key == "is_in" and not (isinstance(value, list) and value):
            yield "has in without a list of values"
        values: Any = value if key == "is_in" else [value] if key == "equals" else []
        if not all(isinstance(each, str | int | float) for each in values):
            yield f"has {key.removeprefix('is_')} with a value that is neither a text, a number nor a boolean"


class StepSpec(Section):
    """One step: the call of a model, or with ``exit`` the end of the pipeline."""

    model: str | None = None
    version: str = ""
    inputs: dict[str, SourceSpec] = Field(default_factory=dict)
    """Tensor of the model -> where it comes from."""
    when: Condition | None = None
    exit: Reason | None = None
    """Ends the pipeline with this reason."""
    after: list[str] = Field(default_factory=list)
    """Steps that end before this one starts."""
    each: str | None = None
    """A source whose rows are the items of further calls."""
    in_flight: Annotated[int, Field(ge=1, le=1024)] = 4
    """The most calls of ``each`` at a time."""
    optional: bool = False
    """A failure, or an answer that comes too late, counts as skipped."""
    timeout_s: Seconds | None = None
    idempotent: bool = False

    def faults(self) -> Iterator[str]:
        if (self.model is None) == (self.exit is None):
            yield "needs exactly one of model and exit"
        if self.exit is not None and (self.when is None or self.model_fields_set - {"exit", "when", "after"}):
            yield "has exit, which needs `when`, and which only `after` may stand beside"
        if self.each is not None and not any(self.each in names_of(given) for given in self.inputs.values()):
            yield f"has each: {self.each}, which is none of its inputs"

    @property
    def needs(self) -> set[str]:
        """The tensors and fields that it reads."""
        read = chain.from_iterable(names_of(each) for each in self.inputs.values())
        return {*read, *(() if self.when is None else self.when.names())}


StepSpecs = Annotated[dict[StepName, StepSpec], Field(min_length=1, max_length=64)]
