"""Explains a request on one clock: milliseconds since the gateway received the request.

An explanation has the phases of the request, and the runs of models in it. The runs come from the tree of Triton's
spans. The tree may be deep, so no function here recurses.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from app.core.errors import Outcome
from app.observability.explain.request import Ended, Found, Plan
from app.observability.explain.spans import CALL, COMPUTE, TritonSpan


class RunKind(StrEnum):
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
    kind: RunKind
    name: str
    compute: dict[str, int]
    """The times of its phases; empty for an ensemble, and for a model that did not begin."""
    above: "Run | None"


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One gRPC call in Triton: its span, None until it has arrived, and its runs.

    The run of the pipeline's model is the first; each run comes before the runs below it.
    """

    span: TritonSpan | None
    runs: Sequence[Run]

    @property
    def is_complete(self) -> bool:
        """Whether every span has arrived. Triton exports spans as they end, and a call and its model end last."""
        return self.span is not None


def calls_of(spans: Sequence[TritonSpan], request_id: str, plan: Plan) -> list[ModelCall]:
    """The calls for a request, in order. ``request_id``: the one that Triton saw, because a trace may have others."""
    by_id = {span.span_id: span for span in spans}
    ordered = sorted(by_id.values(), key=lambda each: each.start_ns)
    builder = _Builder(ordered, plan)
    return [
        ModelCall(_call_above(span, by_id), builder.runs_of(span))
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
        if run.kind is RunKind.STEP:
            run.name = self._step_name(span.model, above.span.model if above else "")
        return run

    def _kind_of(self, span: TritonSpan, above: Run | None, *, has_compute: bool) -> RunKind:
        if above is not None and above.compute:
            return RunKind.BLS
        has_models = any(each.model for each in self._below[span.span_id])
        is_ensemble = span.model in self._plan.ensembles or (has_models and not has_compute)
        return RunKind.ENSEMBLE if is_ensemble else RunKind.STEP

    def _step_name(self, model: str, ensemble: str) -> str:
        """A model that occurs more than once is named in the order of its runs."""
        names = [step.name for step in self._plan.steps if (step.model, step.ensemble) == (model, ensemble)]
        place = self._seen[model, ensemble]
        self._seen[model, ensemble] += 1
        return names[min(place, len(names) - 1)] if names else model


class RunState(StrEnum):
    OK = "ok"
    FAILED = "failed"
    EARLY_EXIT = "early_exit"
    UNKNOWN = "unknown"


_CUT_SHORT = {Outcome.TIMEOUT, Outcome.CANCELLED, Outcome.INTERNAL, Outcome.UNAVAILABLE, Outcome.REJECTED}
"""The gateway did not wait for Triton's answer, or got none."""


def states_of(runs: Sequence[Run], plan: Plan, ended: Ended) -> dict[str, RunState]:
    """The state of each run, by the id of its span. ``runs``: all of one call, the pipeline's model first.

    Triton's spans do not mark the step that failed or that ended the request early: it follows from what ran.
    """
    outcome = ended.outcome
    if outcome in _CUT_SHORT:
        return {run.span.span_id: RunState.UNKNOWN for run in runs}
    states = {run.span.span_id: RunState.OK for run in runs}
    if outcome is Outcome.OK or not runs:
        return states
    ending = RunState.EARLY_EXIT if outcome is Outcome.EARLY_EXIT else RunState.FAILED
    root, *below = runs
    states[root.span.span_id] = ending
    if ended.outcome is Outcome.CONTRACT_VIOLATION and not ended.failed_step:
        return states  # the gateway refused what the steps had answered
    guilty = _named(below, ended.failed_step) or _last(below, plan, ending)
    mark = ending if len(guilty) == 1 else RunState.UNKNOWN
    return states | {run.span.span_id: mark for run in guilty}


def not_run(runs: Sequence[Run], plan: Plan) -> list[str]:
    seen = {run.name for run in runs if run.kind is RunKind.STEP}
    return [step.name for step in plan.steps if step.name not in seen]


def _named(runs: Sequence[Run], model: str) -> list[Run]:
    return [run for run in runs if run.span.model == model][-1:]


def _last(runs: Sequence[Run], plan: Plan, ending: RunState) -> list[Run]:
    """The steps after which nothing ran. An early exit with all steps run was decided from the outputs."""
    steps = [run for run in runs if run.kind is RunKind.STEP]
    if ending is RunState.EARLY_EXIT and not not_run(steps, plan):
        return []
    names = {run.name for run in steps}
    continued = {before for before, after in plan.next_steps if after in names}
    return [run for run in steps if run.name not in continued] or [run for run in runs if run.kind is RunKind.BLS][-1:]


NO_SPANS = (
    "Triton has sent no spans yet. If none come, send the request again: Triton may lose them, or does not trace."
)
CLOCKS_DIFFER_MS = 1.0
"""Triton's answer is this much before or after the gateway's, or more."""


_Ms = Annotated[float, Meta(ge=0)]
_PhaseName = Literal["read", "queue", "triton", "respond"]


class ExplainedPhase(Struct):
    name: _PhaseName
    start_ms: _Ms
    duration_ms: _Ms


class ExplainedRun(Struct):
    """One run of a model. `parent`: the run above it."""

    id: str
    parent: str | None
    name: str
    kind: RunKind
    model: str
    version: str
    start_ms: _Ms
    duration_ms: _Ms
    queue_ms: _Ms | None
    compute_input_ms: _Ms | None
    compute_ms: _Ms | None
    compute_output_ms: _Ms | None
    state: RunState


class Explanation(Struct):
    """Times are milliseconds since the gateway received the request."""

    request_id: str
    pipeline: str
    model: str
    outcome: Annotated[Outcome | None, Meta(description="null while the request runs")] = None
    early_exit: str | None = None
    error: str | None = None
    status: int | None = None
    total_ms: _Ms | None = None
    shared_with: Annotated[int, Meta(ge=0, description="Other requests in the same call to Triton")] = 0
    gateway: list[ExplainedPhase] = []
    spans: list[ExplainedRun] = []
    steps_not_run: list[str] = []
    is_complete: Annotated[bool, Meta(description="If false, ask again: Triton's spans arrive later")] = False
    notes: list[str] = []


def explanation_of(found: Found) -> Explanation:
    request, plan, ended = found.request, found.request.plan, found.request.ended
    explained = Explanation(request.request_id, plan.pipeline, plan.model)
    if ended is None:
        return replace(explained, notes=["The request is still running."])
    explained.outcome, explained.early_exit = ended.outcome, ended.early_exit
    explained.error, explained.status = ended.error, ended.status
    explained.shared_with = ended.shared_with
    explained.total_ms, explained.gateway = _rounded(ended.total_s * 1e3), phases_of(ended)
    if ended.triton_at_s is None:
        return replace(explained, is_complete=True, notes=["The request ended before the gateway called Triton."])
    return replace(explained, **_triton(found, plan, ended, ended.triton_at_s * 1e3))


def phases_of(ended: Ended) -> list[ExplainedPhase]:
    """The phases in order. Their durations add up to the total."""
    total_ms, queue_ms = ended.total_s * 1e3, ended.queue_s * 1e3
    if ended.triton_at_s is None:
        return _phases(("read", total_ms - queue_ms), ("queue", queue_ms))
    read_ms, triton_ms = ended.triton_at_s * 1e3 - queue_ms, ended.triton_s * 1e3
    respond_ms = total_ms - read_ms - queue_ms - triton_ms
    return _phases(("read", read_ms), ("queue", queue_ms), ("triton", triton_ms), ("respond", respond_ms))


def _phases(*phases: tuple[_PhaseName, float]) -> list[ExplainedPhase]:
    listed, start_ms = [], 0.0
    for name, duration_ms in phases:
        listed.append(ExplainedPhase(name, _rounded(start_ms), _rounded(max(duration_ms, 0.0))))
        start_ms += max(duration_ms, 0.0)
    return listed


def _triton(found: Found, plan: Plan, ended: Ended, start_ms: float) -> dict[str, Any]:
    """The part that Triton's spans tell. ``start_ms``: when the gateway called Triton."""
    calls = calls_of(found.spans, ended.triton_request_id, plan)
    if not calls:
        return {"notes": [*_notes_of_sharing(ended), NO_SPANS]}
    last = calls[-1]
    runs = last.runs
    is_complete = last.is_complete
    window = _Window(start_ms, start_ms + ended.triton_s * 1e3)
    clock = _clock_of(found.request.started_ns, last, window)
    states = states_of(runs, plan, ended) if is_complete else {}
    shown = _Shown(window, clock, states)
    spans = [span for call in calls for span in shown.spans(call.runs)]
    return {
        "spans": spans,
        "steps_not_run": not_run(runs, plan) if is_complete else [],
        "is_complete": is_complete,
        "notes": _notes(found, runs, shown, calls, is_complete=is_complete),
    }


@dataclass(frozen=True, slots=True)
class _Window:
    """The phase ``triton``, in milliseconds."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class _Clock:
    """Converts Triton's times. ``shift_ms``: added if the clocks of Triton and the gateway differ."""

    started_ns: int
    shift_ms: float = 0.0

    def ms(self, at_ns: int) -> float:
        return (at_ns - self.started_ns) / 1e6 + self.shift_ms


def _clock_of(started_ns: int, call: ModelCall, window: _Window) -> _Clock:
    """Moves the call to the middle of the phase if it lies outside of it."""
    clock, span = _Clock(started_ns), call.span or call.runs[0].span
    answered_ns = span.moments.get("INFER_RESPONSE_COMPLETE", span.end_ns)
    begins_ms, answered_ms = clock.ms(span.start_ns), clock.ms(answered_ns)
    if begins_ms >= window.start_ms - CLOCKS_DIFFER_MS and answered_ms <= window.end_ms + CLOCKS_DIFFER_MS:
        return clock
    return _Clock(started_ns, (window.start_ms + window.end_ms) / 2 - (begins_ms + answered_ms) / 2)


class _Shown:
    """Spans as the answer shows them. Each ends with the answer of its run, but Triton ends it after a clean-up.

    The answer of a call comes at the end of the phase at the latest. The answer of a run below another comes before the
    end of the run above, except if it still computed then: a script or a failed ensemble did not wait for it.
    """

    def __init__(self, window: _Window, clock: _Clock, states: dict[str, RunState]) -> None:
        self._window = window
        self._states = states
        self.clock = clock
        self.cut_ms = 0.0
        """The largest part that was cut from a span."""

    def spans(self, runs: Sequence[Run]) -> Iterator[ExplainedRun]:
        """``runs``: all of one call, each before the runs below it."""
        computed_until = computed_until_ns(runs)
        ends_ns: dict[str, int] = {}
        for run in runs:
            span_id, end_ns = run.span.span_id, run.span.end_ns
            if run.above is not None:
                above_ns = ends_ns[run.above.span.span_id]
                if computed_until[span_id] <= above_ns:
                    end_ns = min(end_ns, above_ns)
            ends_ns[span_id] = end_ns
            yield self._span(run, end_ns)

    def _span(self, run: Run, end_ns: int) -> ExplainedRun:
        span = run.span
        start_ms, end_ms = self._ms(span.start_ns), self._ms(end_ns)
        self.cut_ms = max(self.cut_ms, self.clock.ms(span.end_ns) - end_ms)
        return ExplainedRun(
            id=span.span_id,
            parent=run.above.span.span_id if run.above else None,
            name=run.name,
            kind=run.kind,
            model=span.model,
            version=span.version,
            start_ms=_rounded(start_ms),
            duration_ms=_rounded(max(end_ms - start_ms, 0.0)),
            queue_ms=self._between(span.moments | run.compute, "QUEUE_START", "COMPUTE_START", end_ms),
            compute_input_ms=self._between(run.compute, "COMPUTE_START", "COMPUTE_INPUT_END", end_ms),
            compute_ms=self._between(run.compute, "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", end_ms),
            compute_output_ms=self._between(run.compute, "COMPUTE_OUTPUT_START", "COMPUTE_END", end_ms),
            state=self._states.get(span.span_id, RunState.UNKNOWN),
        )

    def _ms(self, at_ns: int) -> float:
        return min(max(self.clock.ms(at_ns), self._window.start_ms), self._window.end_ms)

    def _between(self, moments: dict[str, int], first: str, second: str, end_ms: float) -> float | None:
        if first not in moments or second not in moments:
            return None
        return _rounded(max(min(self._ms(moments[second]), end_ms) - self._ms(moments[first]), 0.0))


def _notes(
    found: Found, runs: Sequence[Run], shown: _Shown, calls: Sequence[ModelCall], *, is_complete: bool
) -> list[str]:
    """Plain sentences: what the trace cannot tell for this request."""
    plan, ended = found.request.plan, found.request.ended
    assert ended is not None
    notes = _notes_of_sharing(ended)
    if not is_complete:
        notes.append("Some of Triton's spans have not arrived yet.")
    if len(calls) > 1:
        notes.append(f"The gateway called Triton {len(calls)} times; the states are those of the last call.")
    if shown.clock.shift_ms:
        notes.append(f"The clocks differ: Triton's times are moved by {shown.clock.shift_ms:.1f} ms.")
    if shown.cut_ms >= 0.1:
        notes.append(f"Triton ended spans up to {shown.cut_ms:.1f} ms after their answers; that part is not shown.")
    if found.dropped:
        notes.append(f"{found.dropped} spans over the limit are not shown.")
    if ended.outcome in (Outcome.TIMEOUT, Outcome.CANCELLED):
        notes.append("The gateway ended the request; Triton may have continued.")
    return notes + _notes_of_steps(runs, plan)


def _notes_of_sharing(ended: Ended) -> list[str]:
    if not ended.shared_with:
        return []
    others = "1 other" if ended.shared_with == 1 else f"{ended.shared_with} others"
    return [f"The gateway sent the request with {others} in one call; Triton's spans belong to one of them."]


def _notes_of_steps(runs: Sequence[Run], plan: Plan) -> list[str]:
    names = {run.name for run in runs if run.kind is RunKind.STEP}
    notes = [
        f"'{step.name}' is decoupled: its span ends when its script returns, which may be before its outputs."
        for step in plan.steps
        if step.decoupled and step.name in names
    ]
    unseen = plan.calls - {run.span.model for run in runs}
    if unseen:
        listed = ", ".join(f"'{model}'" for model in sorted(unseen))
        notes.append(f"A script may call {listed}: not called here, or called without `trace=`.")
    return notes


def _rounded(milliseconds: float) -> float:
    return round(milliseconds, 3)
