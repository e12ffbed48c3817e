"""An engine without a server, which returns scripted answers and records its requests."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from app.core.engine import InferenceServer
from app.core.errors import GatewayError, ModelNotReady, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest, InferenceResponse
from app.core.model import ModelConfig, ModelState

Answer = InferenceResponse | GatewayError | float
"""A response, an error that ends the answer, or seconds of silence."""


@dataclass
class FakeEngine(InferenceServer):
    configs: dict[str, ModelConfig] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    unready: set[str] = field(default_factory=set)
    is_up: bool = True
    reason: str = ""
    """The reason in the index for a model that is not ready."""
    faults: dict[str, str] = field(default_factory=dict)
    """Why a model that Triton reports as ready is not."""
    requests: list[InferenceRequest] = field(default_factory=list)
    closed: int = 0
    """Streams whose generator was closed or ran out."""

    @classmethod
    def of(cls, *configs: ModelConfig, answers: Sequence[Answer] = ()) -> "FakeEngine":
        return cls({config.name: config for config in configs}, list(answers))

    def fault(self, model: str) -> str:
        return self.faults.get(model, "")

    async def is_live(self) -> bool:
        return self.is_up

    async def models(self) -> Sequence[ModelState]:
        self._check_up()
        return [ModelState(name, "1", name not in self.unready, self.reason) for name in self.configs]

    async def model_ready(self, model: str, version: str = "") -> bool:
        self._check_up()
        return model in self.configs and model not in self.unready

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        self._check_up()
        if not await self.model_ready(model):
            raise ModelNotReady(f"Triton has no ready model '{model}'.")
        return self.configs[model]

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        responses = [response async for response in self.infer_stream(request, deadline)]
        return responses[0]

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        self.requests.append(request)
        try:
            for answer in self.answers:
                if isinstance(answer, GatewayError):
                    raise answer
                if isinstance(answer, float):
                    await asyncio.sleep(answer)
                else:
                    yield answer
        finally:
            self.closed += 1

    def _check_up(self) -> None:
        if not self.is_up:
            raise UpstreamUnavailable("Triton cannot be reached.")
