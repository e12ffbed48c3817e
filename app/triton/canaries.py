"""Requests of the gateway's own, which tell whether a model works."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.domain.inference import InferenceRequest


@dataclass(frozen=True, slots=True)
class Canary:
    """A request that a model is known to answer, made of a pipeline's ``sample``."""

    request: InferenceRequest
    is_decoupled: bool


class Canaries(Protocol):
    def all(self) -> Sequence[Canary]:
        """A new canary for each model of a pipeline with a sample."""
