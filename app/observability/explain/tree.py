"""The runs of models in one request, from the tree of Triton's spans. The tree may be deep: nothing here recurses."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """One run of a model, and the run that it belongs to.

    ``name``: that of the pipeline's step if it is one, otherwise the model's.
    """

    span: TritonSpan
    kind: Kind
    name: str
    compute: dict[str, int]
    """The times of its phases; empty for an ensemble, and for a model that did not begin."""
    above: "Run | None"


@dataclass(frozen=True, slots=True)
class Call:
    """One gRPC call in Triton: its span, None until it has arrived, and its runs.

    The run of the pipeline's model is the first; each run comes before the runs below it.
    """

    span: TritonSpan | None
    runs: Sequence[Run]

    @property
    def is_complete(self) -> bool:
        """Whether every span has arrived. Triton exports spans as they end, and a call and its model end last."""
        return self.span is not None


def calls_of(spans: Sequence[TritonSpan], request_id: str, plan: Plan) -> list[Call]:
    """The calls for a request, in order. ``request_id``: the one that Triton saw, because a trace may have others."""
    by_id = {span.span_id: span for span in spans}
    ordered = sorted(by_id.values(), key=lambda each: each.start_ns)
    builder = _Builder(ordered, plan)
    return [
        Call(_call_above(span, by_id), builder.runs_of(span))
        for span in ordered
        if span.model and span.request_id == request_id and not _is_below_a_model(span, by_id)
    ]


def computed_until_ns(runs: Sequence[Run]) -> dict[str, int]:
    """When each run, or a run below it, last computed, by the id of its span; its start if nothing computed.

    ``runs``: each before the runs below it.
    """
    until: dict[str, int] = {}
    for run in reversed(runs):
        computed_ns = run.compute.get("COMPUTE_OUTPUT_START", run.span.start_ns)
        until[run.span.span_id] = until_ns = max(computed_ns, until.get(run.span.span_id, 0))
        if run.above is not None:
            above = run.above.span.span_id
            until[above] = max(until_ns, until.get(above, 0))
    return until


def _is_below_a_model(span: TritonSpan, by_id: Mapping[str, TritonSpan]) -> bool:
    return span.parent_id in by_id and bool(by_id[span.parent_id].model)


def _call_above(span: TritonSpan, by_id: Mapping[str, TritonSpan]) -> TritonSpan | None:
    above = by_id.get(span.parent_id)
    return above if above is not None and above.name == CALL else None


class _Builder:
    """``spans``: each once, in the order of their starts."""

    def __init__(self, spans: Sequence[TritonSpan], plan: Plan) -> None:
        self._plan = plan
        self._below: dict[str, list[TritonSpan]] = defaultdict(list)
        self._seen: dict[tuple[str, str], int] = defaultdict(int)
        for span in spans:
            self._below[span.parent_id].append(span)

    def runs_of(self, root: TritonSpan) -> list[Run]:
        """Returns the run of ``root`` and all runs below it."""
        runs: list[Run] = []
        waiting: list[tuple[TritonSpan, Run | None]] = [(root, None)]
        while waiting:
            span, above = waiting.pop()
            run = self._run(span, above)
            runs.append(run)
            waiting += [(each, run) for each in reversed(self._below[span.span_id]) if each.model]
        return runs

    def _run(self, span: TritonSpan, above: Run | None) -> Run:
        below = self._below[span.span_id]
        compute = next((each.moments for each in below if each.name == COMPUTE and not each.model), {})
        run = Run(span, self._kind_of(span, above, has_compute=bool(compute)), span.model, compute, above)
        if run.kind is Kind.STEP:
            run.name = self._step_name(span.model, above.span.model if above else "")
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
