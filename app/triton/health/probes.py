"""Closes the breakers of one Triton: probes each model with its pipeline's sample until the model answers."""

import asyncio

from app.core.engine import Engine
from app.core.errors import DeadlineExceeded, GatewayError, Unavailable
from app.core.inference import Deadline
from app.triton.health.canaries import Canaries, Canary, answer, canary_of
from app.triton.health.health import Breaker, Breakers

POLL_S = 0.05
LONGEST_PROBE_S = 30.0


class BreakerProbes:
    """Probes the models. Without a sample, or while Triton is unreachable, the probe checks if the model is ready."""

    def __init__(self, engine: Engine, breakers: Breakers, canaries: Canaries) -> None:
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
            return False
        return True
