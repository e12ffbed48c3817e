"""``GATEWAY_LOG_TENSORS=shapes``: what came over the wire, by request id; names, datatypes and shapes, never values."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.inference import InferenceRequest, InferenceResponse
from app.domain.model import ModelConfig, ModelState

_log = logging.getLogger("triton_gateway.tensors")


class TensorLog:
    """An engine that logs a line for each response of the engine behind it."""

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
        response = await self._engine.infer(request, deadline)
        _note(request, response, 1)
        return response

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        number = 0
        async with aclosing(self._engine.infer_stream(request, deadline)) as responses:
            async for response in responses:
                number += 1
                _note(request, response, number)
                yield response


def _note(request: InferenceRequest, response: InferenceResponse, number: int) -> None:
    tensors = " ".join(f"{each.name}:{each.datatype}{list(each.shape)}" for each in response.outputs.values())
    line = {"triton_request_id": request.request_id, "model": request.model, "response": number, "tensors": tensors}
    _log.info("tensors", extra=line | {"final": response.is_final})
