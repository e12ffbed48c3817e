"""The explanation of a request: one clock, milliseconds since the gateway received the request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.errors import Outcome
from app.observability.explain.request import Ended, Found, Plan
from app.observability.explain.states import State, not_run, states_of
from app.observability.explain.tree import Call, Kind, Run, calls_of, computed_until_ns

NO_SPANS = (
    "Triton has sent no spans yet. If none come, send the request again: Triton may lose them, or does not trace."
)
CLOCKS_DIFFER_MS = 1.0
"""Triton's answer is this much before or after the gateway's, or more."""


def explanation_of(found: Found) -> dict[str, Any]:
    """The JSON object of ``GET /v1/requests/{id}/explain``."""
    request, ended = found.request, found.request.ended
    plan = request.plan
    explained: dict[str, Any] = {
        "request_id": request.request_id,
        "pipeline": plan.pipeline,
        "model": plan.model,
        "outcome": None,
        "early_exit": None,
        "error": None,
        "status": None,
        "total_ms": None,
        "gateway": [],
        "spans": [],
        "steps_not_run": [],
        "is_complete": False,
        "notes": ["The request is still running."],
    }
    if ended is None:
        return explained
    explained |= {
        "outcome": str(ended.outcome),
        "early_exit": ended.early_exit,
        "error": ended.error,
        "status": ended.status,
        "total_ms": _rounded(ended.total_s * 1e3),
        "gateway": phases_of(ended),
    }
    if ended.triton_at_s is None:
        return explained | {"is_complete": True, "notes": ["The request ended before the gateway called Triton."]}
    return explained | _triton(found, plan, ended, ended.triton_at_s * 1e3)


def phases_of(ended: Ended) -> list[dict[str, Any]]:
    """The phases in order. Their durations add up to the total."""
    total_ms, queue_ms = ended.total_s * 1e3, ended.queue_s * 1e3
    if ended.triton_at_s is None:
        return _phases(("read", total_ms - queue_ms), ("queue", queue_ms))
    read_ms, triton_ms = ended.triton_at_s * 1e3 - queue_ms, ended.triton_s * 1e3
    respond_ms = total_ms - read_ms - queue_ms - triton_ms
    return _phases(("read", read_ms), ("queue", queue_ms), ("triton", triton_ms), ("respond", respond_ms))


def _phases(*phases: tuple[str, float]) -> list[dict[str, Any]]:
    listed, start_ms = [], 0.0
    for name, duration_ms in phases:
        listed.append({"name": name, "start_ms": _rounded(start_ms), "duration_ms": _rounded(max(duration_ms, 0.0))})
        start_ms += max(duration_ms, 0.0)
    return listed


def _triton(found: Found, plan: Plan, ended: Ended, start_ms: float) -> dict[str, Any]:
    """The part that Triton's spans tell. ``start_ms``: when the gateway called Triton."""
    calls = calls_of(found.spans, ended.triton_request_id, plan)
    if not calls:
        return {"notes": [NO_SPANS]}
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


def _clock_of(started_ns: int, call: Call, window: _Window) -> _Clock:
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

    def __init__(self, window: _Window, clock: _Clock, states: dict[str, State]) -> None:
        self._window = window
        self._states = states
        self.clock = clock
        self.cut_ms = 0.0
        """The largest part that was cut from a span."""

    def spans(self, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
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

    def _span(self, run: Run, end_ns: int) -> dict[str, Any]:
        span = run.span
        start_ms, end_ms = self._ms(span.start_ns), self._ms(end_ns)
        self.cut_ms = max(self.cut_ms, self.clock.ms(span.end_ns) - end_ms)
        return {
            "id": span.span_id,
            "parent": run.above.span.span_id if run.above else None,
            "name": run.name,
            "kind": str(run.kind),
            "model": span.model,
            "version": span.version,
            "start_ms": _rounded(start_ms),
            "duration_ms": _rounded(max(end_ms - start_ms, 0.0)),
            "queue_ms": self._between(span.moments | run.compute, "QUEUE_START", "COMPUTE_START", end_ms),
            "compute_input_ms": self._between(run.compute, "COMPUTE_START", "COMPUTE_INPUT_END", end_ms),
            "compute_ms": self._between(run.compute, "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", end_ms),
            "compute_output_ms": self._between(run.compute, "COMPUTE_OUTPUT_START", "COMPUTE_END", end_ms),
            "state": str(self._states.get(span.span_id, State.UNKNOWN)),
        }

    def _ms(self, at_ns: int) -> float:
        return min(max(self.clock.ms(at_ns), self._window.start_ms), self._window.end_ms)

    def _between(self, moments: dict[str, int], first: str, second: str, end_ms: float) -> float | None:
        if first not in moments or second not in moments:
            return None
        return _rounded(max(min(self._ms(moments[second]), end_ms) - self._ms(moments[first]), 0.0))


def _notes(found: Found, runs: Sequence[Run], shown: _Shown, calls: Sequence[Call], *, is_complete: bool) -> list[str]:
    """Plain sentences: what the trace cannot tell for this request."""
    plan, ended = found.request.plan, found.request.ended
    assert ended is not None
    notes = [] if is_complete else ["Some of Triton's spans have not arrived yet."]
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


def _notes_of_steps(runs: Sequence[Run], plan: Plan) -> list[str]:
    names = {run.name for run in runs if run.kind is Kind.STEP}
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
