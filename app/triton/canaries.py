"""Requests of the gateway's own, which tell whether a model works."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.inference import InferenceRequest


@dataclass(frozen=True, slots=True)
class Canary:
    """A request that a model is known to answer, made of a pipeline's ``sample``."""

    request: InferenceRequest
    is_decoupled: bool


class Canaries(Protocol):
    def all(self) -> Sequence[Canary]:
        """A new canary for each model of a pipeline with a sample."""


async def answer(engine: Engine, canary: Canary, deadline: Deadline) -> None:
    """Returns at the model's first response. Raises GatewayError."""
    if not canary.is_decoupled:
        await engine.infer(canary.request, deadline)
        return
    async with aclosing(engine.infer_stream(canary.request, deadline)) as responses:
        async for _ in responses:
            return
