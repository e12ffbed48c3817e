"""Canary requests, with which the gateway checks whether a model works.

Closes the breakers of one Triton: probes each model with its pipeline's sample until the model answers.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from app.core.engine import InferenceServer
from app.core.errors import DeadlineExceeded, GatewayError, Unavailable
from app.core.inference import Deadline, InferenceRequest
from app.triton.health.health import Breaker, Breakers


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


async def answer(engine: InferenceServer, canary: Canary, deadline: Deadline) -> None:
    """Sends the canary and returns after the model's first response. Raises GatewayError."""
    if not canary.is_decoupled:
        await engine.infer(canary.request, deadline)
        return
    async with aclosing(engine.infer_stream(canary.request, deadline)) as responses:
        async for _ in responses:
            return


POLL_S = 0.05
LONGEST_PROBE_S = 30.0


class BreakerProbes:
    """Probes the models. Without a sample, or while Triton is unreachable, the probe checks if the model is ready."""

    def __init__(self, engine: InferenceServer, breakers: Breakers, canaries: Canaries) -> None:
        self._engine = engine
        self._breakers = breakers
        self._canaries = canaries

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._breakers.opened.wait()
            due = {model: breaker for model, breaker in self._breakers.open.items() if breaker.is_due}
            if due:
                await asyncio.gather(*(self._probe(model, breaker) for model, breaker in due.items()))
            else:
                await asyncio.sleep(POLL_S)

    async def _probe(self, model: str, breaker: Breaker) -> None:
        if await self._works(model, breaker):
            self._breakers.close(model)
        else:
            breaker.probe_failed()

    async def _works(self, model: str, breaker: Breaker) -> bool:
        try:
            if not await self._engine.model_ready(model):
                return False
            canary = canary_of(self._canaries, model) if breaker.is_reached else None
            return canary is None or await self._answers(canary)
        except Unavailable:
            return False
        except GatewayError:
            return True  # an error of the model is an answer

    async def _answers(self, canary: Canary) -> bool:
        """Raises GatewayError."""
        deadline = Deadline.after(min(self._breakers.timeout_s(canary.request.model), LONGEST_PROBE_S))
        try:
            await answer(self._engine, canary, deadline)
        except DeadlineExceeded:
            return self._breakers.has_answered_since_opened(canary.request.model)
        return True
