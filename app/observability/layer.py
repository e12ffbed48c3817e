"""What lies around an engine and watches it; by itself it only hands on."""

from collections.abc import AsyncGenerator, Sequence

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.model import ModelConfig, ModelState


class EngineLayer:
    """Implements :class:`app.domain.engine.Engine` by the engine behind it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def is_live(self) -> bool:
        return await self._engine.is_live()

    async def models(self) -> Sequence[ModelState]:
        return await self._engine.models()

    async def model_ready(self, model: str, version: str = "") -> bool:
        return await self._engine.model_ready(model, version)

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        return await self._engine.model_config(model, version)

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        return await self._engine.infer(request, deadline)

    def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        return self._engine.infer_stream(request, deadline)
