"""The runs of models in one request, as a tree of Triton's spans."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from app.observability.explain.request import Plan
from app.observability.explain.spans import CALL, COMPUTE, TritonSpan


class Kind(StrEnum):
    ENSEMBLE = "ensemble"
    STEP = "step"
    BLS = "bls"
    """A model that a BLS script called."""


@dataclass(slots=True)
class Run:
    """One run of a model. ``name``: that of the pipeline's step if it is one, otherwise the model's."""

    span: TritonSpan
    kind: Kind
    name: str
    compute: dict[str, int]
    """The times of its phases; empty for an ensemble, and for a model that did not begin."""
    runs: list["Run"] = field(default_factory=list)

    def all(self) -> Iterator["Run"]:
        """This run and all runs below, each parent before its children."""
        yield self
        for run in self.runs:
            yield from run.all()


@dataclass(frozen=True, slots=True)
class Call:
    """One gRPC call in Triton: its span, None until it has arrived, and the run of the pipeline's model."""

    span: TritonSpan | None
    run: Run

    @property
    def is_complete(self) -> bool:
        """Whether every span has arrived. Triton exports spans as they end, and a call and its model end last."""
        return self.span is not None


def calls_of(spans: Sequence[TritonSpan], request_id: str, plan: Plan) -> list[Call]:
    """The calls for a request, in order. ``request_id``: the one that Triton saw, because a trace may have others."""
    by_id = {span.span_id: span for span in spans}
    builder = _Builder(spans, plan)
    return [
        Call(_call_above(span, by_id), builder.run(span, None))
        for span in sorted(spans, key=lambda each: each.start_ns)
        if span.model and span.request_id == request_id and not _is_below_a_model(span, by_id)
    ]


def _is_below_a_model(span: TritonSpan, by_id: Mapping[str, TritonSpan]) -> bool:
    return span.parent_id in by_id and bool(by_id[span.parent_id].model)


def _call_above(span: TritonSpan, by_id: Mapping[str, TritonSpan]) -> TritonSpan | None:
    above = by_id.get(span.parent_id)
    return above if above is not None and above.name == CALL else None


class _Builder:
    def __init__(self, spans: Sequence[TritonSpan], plan: Plan) -> None:
        self._plan = plan
        self._below: dict[str, list[TritonSpan]] = defaultdict(list)
        self._seen: dict[tuple[str, str], int] = defaultdict(int)
        self._built: set[str] = set()
        for span in sorted(spans, key=lambda each: each.start_ns):
            self._below[span.parent_id].append(span)

    def run(self, span: TritonSpan, above: Run | None) -> Run:
        """``above``: the run that this one belongs to."""
        self._built.add(span.span_id)  # a hostile export could have a circle
        below = [each for each in self._below[span.span_id] if each.span_id not in self._built]
        compute = next((each.moments for each in below if each.name == COMPUTE and not each.model), {})
        run = Run(span, self._kind_of(span, above, has_compute=bool(compute)), span.model, compute)
        if run.kind is Kind.STEP:
            run.name = self._step_name(span.model, above.span.model if above else "")
        run.runs = [self.run(each, run) for each in below if each.model]
        return run

    def _kind_of(self, span: TritonSpan, above: Run | None, *, has_compute: bool) -> Kind:
        if above is not None and above.compute:
            return Kind.BLS
        has_models = any(each.model for each in self._below[span.span_id])
        is_ensemble = span.model in self._plan.ensembles or (has_models and not has_compute)
        return Kind.ENSEMBLE if is_ensemble else Kind.STEP

    def _step_name(self, model: str, ensemble: str) -> str:
        """A model that occurs more than once is named in the order of its runs."""
        names = [step.name for step in self._plan.steps if (step.model, step.ensemble) == (model, ensemble)]
        place = self._seen[model, ensemble]
        self._seen[model, ensemble] += 1
        return names[min(place, len(names) - 1)] if names else model
