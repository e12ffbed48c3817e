"""``GATEWAY_LOG_TENSORS=shapes``: what came over the wire, by request id; names, datatypes and shapes, never values."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.domain.deadline import Deadline
from app.domain.inference import InferenceRequest, InferenceResponse
from app.observability.layer import EngineLayer

_log = logging.getLogger("triton_gateway.tensors")


class TensorLog(EngineLayer):
    """An engine that logs a line for each response of the engine behind it."""

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
