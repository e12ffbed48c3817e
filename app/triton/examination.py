"""Examines a model with a canary, and distinguishes a busy model from a hung one.

Triton executes requests although their callers do not wait any more. So a model that answers nothing in time may be
busy for minutes. Triton's statistics count the requests that it completes in this time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from app.domain.deadline import Deadline
from app.domain.errors import DeadlineExceeded, GatewayError, Unavailable
from app.triton.canaries import Canary, answer
from app.triton.engine import TritonEngine
from app.triton.progress import Progress

HUNG_S = 60.0
"""A model hangs if it completes nothing for this time. Slower canaries and longer deadlines extend this time."""


class Verdict(Enum):
    WORKS = auto()
    """The model answers, or it is busy."""
    SILENT = auto()
    UNKNOWN = auto()
    """Triton, its statistics or the model cannot be reached."""


async def examine(engine: TritonEngine, progress: Progress, canary: Canary, method: str) -> Verdict:
    """Sends the canary with the gRPC method ``method``."""
    timeout_s = progress.timeout_s(canary.request.model)
    canary = replace(canary, is_decoupled=method == "ModelStreamInfer")
    try:
        before = await _completed(engine, canary)
        if await _is_answered(engine, canary, timeout_s):
            return Verdict.WORKS
        after = await _completed(engine, canary)
    except GatewayError:
        return Verdict.UNKNOWN
    return Verdict.WORKS if _is_busy(canary, before, after, timeout_s) else Verdict.SILENT


def hung_after_s(canary: Canary, progress: Progress) -> float:
    """Returns how long the model must be silent until it counts as hung: longer than any request may take."""
    return max(HUNG_S, progress.timeout_s(canary.request.model), canary.deadline_s)


async def _is_answered(engine: TritonEngine, canary: Canary, timeout_s: float) -> bool:
    """Raises Unavailable. Other errors are answers."""
    try:
        await answer(engine, canary, Deadline.after(timeout_s))
    except DeadlineExceeded:
        return False
    except Unavailable:
        raise
    except GatewayError:
        pass
    return True


@dataclass(frozen=True, slots=True)
class _Completed:
    """The executions of a model since it was loaded, and its successful requests with their total time in Triton."""

    executions: int
    requests: int
    request_ns: int

    def average_s_since(self, earlier: "_Completed") -> float:
        requests = self.requests - earlier.requests
        return (self.request_ns - earlier.request_ns) / requests / 1e9 if requests > 0 else 0.0


async def _completed(engine: TritonEngine, canary: Canary) -> dict[str, _Completed]:
    """By model that the canary uses. Raises GatewayError, also if the server has no statistics."""
    return {model: _sum_of(await engine.document("stats", model)) for model in canary.models}


def _sum_of(statistics: Mapping[str, Any]) -> _Completed:
    versions = statistics["model_stats"]
    successes = [version["inference_stats"]["success"] for version in versions]
    return _Completed(
        sum(version["execution_count"] for version in versions),
        sum(success["count"] for success in successes),
        sum(success["ns"] for success in successes),
    )


def _is_busy(
    canary: Canary, before: Mapping[str, _Completed], after: Mapping[str, _Completed], timeout_s: float
) -> bool:
    """Whether other requests explain that the canary was not answered.

    The canary itself counts as an execution of an ensemble's steps and, before its response, of a decoupled model.
    So these are busy only if the completed requests took about as long as the canary waited.
    """
    model = canary.request.model
    if not canary.is_decoupled and after[model].executions != before[model].executions:
        return True
    return sum(after[name].average_s_since(before[name]) for name in after) >= timeout_s / 2
