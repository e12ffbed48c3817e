"""Canary requests, with which the gateway checks whether a model works."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from app.core.engine import Engine
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


class Canaries(Protocol):
    def all(self) -> Sequence[Canary]:
        """Returns a new canary for each model whose pipeline has a sample."""


def canary_of(canaries: Canaries, model: str) -> Canary | None:
    """Returns a new canary for a model; None if no pipeline over the model has a sample."""
    return next((canary for canary in canaries.all() if canary.request.model == model), None)


async def answer(engine: Engine, canary: Canary, deadline: Deadline) -> None:
    """Sends the canary and returns after the model's first response. Raises GatewayError."""
    if not canary.is_decoupled:
        await engine.infer(canary.request, deadline)
        return
    async with aclosing(engine.infer_stream(canary.request, deadline)) as responses:
        async for _ in responses:
            return
