"""Cancels a step of an ensemble. Triton does not pass a cancellation on to the steps."""

import logging
from contextlib import aclosing

from app.domain.background import BackgroundTasks
from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import GatewayError
from app.domain.inference import InferenceRequest
from app.domain.tensor import BYTES, Tensor, bytes_array
from app.pipelines.pipeline import Pipeline

CANCEL_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Canceller:
    """Calls a pipeline's ``cancel`` model with the id of an abandoned request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls = BackgroundTasks()

    def cancel(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        """Starts the call and returns at once. A no-op for a pipeline without ``cancel``."""
        if pipeline.spec.cancel is None:
            return
        tensor = Tensor(pipeline.spec.cancel.input, BYTES, bytes_array([request.request_id.encode()], (1,)))
        self._calls.start(self._call(InferenceRequest(pipeline.spec.cancel.model, (tensor,), about=request.request_id)))

    async def close(self) -> None:
        """Waits for the running calls."""
        await self._calls.close()

    async def _call(self, request: InferenceRequest) -> None:
        try:
            async with aclosing(self._engine.infer_stream(request, Deadline.after(CANCEL_TIMEOUT_S))) as responses:
                async for _ in responses:
                    pass
        except GatewayError as exc:
            _log.warning("cancel call to model '%s' failed: %s", request.model, exc.detail)
