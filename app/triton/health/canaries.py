"""Canary requests, with which the gateway checks whether a model works."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from app.core.engine import Engine, InferenceServer
from app.core.errors import DeadlineExceeded, GatewayError, Unavailable
from app.core.inference import Deadline, InferenceRequest


@dataclass(frozen=True, slots=True)
class Canary:
    """A request that the model should be able to answer, made from a pipeline's ``sample``."""

    request: InferenceRequest
    is_decoupled: bool
    models: frozenset[str]
    """The models that the request uses: the called one, and the models that it runs."""
    deadline_s: float
    """The longest deadline of a pipeline that uses one of these models."""


Canaries = Callable[[], Sequence[Canary]]
"""Returns a new canary for each model whose pipeline has a sample."""


def canary_of(canaries: Canaries, model: str) -> Canary | None:
    """Returns a new canary for a model; None if no pipeline over the model has a sample."""
    return next((canary for canary in canaries() if canary.request.model == model), None)


async def is_answered(engine: Engine, canary: Canary, timeout_s: float) -> bool:
    """Waits for the first response. An error of the model is an answer. Raises Unavailable."""
    deadline = Deadline.after(timeout_s)
    try:
        if not canary.is_decoupled:
            await engine.infer(canary.request, deadline)
            return True
        async with aclosing(engine.infer_stream(canary.request, deadline)) as responses:
            async for _ in responses:
                return True
    except DeadlineExceeded:
        return False
    except Unavailable:
        raise
    except GatewayError:
        pass
    return True


async def works(engine: InferenceServer, canary: Canary, timeout_s: float, method: str) -> bool | None:
    """Sends the canary with the gRPC method ``method``, and distinguishes a busy model from a hung one.

    Triton executes requests although their callers do not wait any more. So a model that answers nothing in time may be
    busy for minutes. Triton's statistics count the requests that it completes in this time.

    Returns:
        None if Triton, its statistics or the model cannot be reached.
    """
    canary = replace(canary, is_decoupled=method == "ModelStreamInfer")

    async def completed() -> dict[str, tuple[int, int, int]]:
        """Model -> its executions since it was loaded, its successful requests, and their nanoseconds in Triton."""
        found = {}
        for model in canary.models:
            versions = (await engine.document("stats", model))["model_stats"]
            successes = [version["inference_stats"]["success"] for version in versions]
            executions = sum(version["execution_count"] for version in versions)
            found[model] = executions, sum(each["count"] for each in successes), sum(each["ns"] for each in successes)
        return found

    try:
        before = await completed()
        if await is_answered(engine, canary, timeout_s):
            return True
        after = await completed()
    except GatewayError:
        return None
    # The canary itself counts as an execution of an ensemble's steps and, before its response, of a decoupled model.
    # So these are busy only if the completed requests took about as long as the canary waited.
    model = canary.request.model
    if not canary.is_decoupled and after[model][0] != before[model][0]:
        return True
    gained = [(after[name][1] - before[name][1], after[name][2] - before[name][2]) for name in after]
    return sum(ns / requests / 1e9 for requests, ns in gained if requests > 0) >= timeout_s / 2
