"""Helpers for tests of the watches over Triton: samples, and a watch as a task."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress

from app.core.inference import InferenceRequest
from app.triton.health.canaries import Canary

WITHIN_S = 30.0


class Samples:
    """A canary for each model; only the model ``decoupled`` is decoupled."""

    def __init__(self, *models: str, steps: Mapping[str, set[str]] | None = None, deadline_s: float = 0.0) -> None:
        self.models = models
        self.steps = steps or {}
        self.deadline_s = deadline_s

    def all(self) -> list[Canary]:
        requests = [InferenceRequest(model, (), is_probe=True) for model in self.models]
        return [self._canary(request) for request in requests]

    def _canary(self, request: InferenceRequest) -> Canary:
        models = frozenset({request.model, *self.steps.get(request.model, ())})
        return Canary(request, request.model == "decoupled", models, self.deadline_s)


@asynccontextmanager
async def running(watch: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(watch)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.002)
