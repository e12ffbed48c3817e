"""Stopping a step that Triton itself will not stop: cancellation never reaches the steps of an ensemble."""

import asyncio
import logging
from contextlib import aclosing

from app.domain.deadline import Deadline
from app.domain.engine import Engine
from app.domain.errors import GatewayError
from app.domain.inference import InferenceRequest
from app.domain.tensor import BYTES, Tensor, bytes_array
from app.pipelines.pipeline import Pipeline

CANCEL_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Canceller:
    """Calls a pipeline's ``cancel`` model with the id of a request that nobody waits for any more."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: set[asyncio.Task[None]] = set()

    def cancel(self, pipeline: Pipeline, request: InferenceRequest) -> None:
        """Returns at once; does nothing for a pipeline that declares no ``cancel``."""
        if pipeline.spec.cancel is None:
            return
        tensor = Tensor(pipeline.spec.cancel.input, BYTES, bytes_array([request.request_id.encode()], (1,)))
        call = asyncio.create_task(self._call(InferenceRequest(pipeline.spec.cancel.model, (tensor,))))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """Waits for the calls under way."""
        await asyncio.gather(*self._calls)

    async def _call(self, request: InferenceRequest) -> None:
        try:
            async with aclosing(self._engine.infer_stream(request, Deadline.after(CANCEL_TIMEOUT_S))) as responses:
                async for _ in responses:
                    pass
        except GatewayError as exc:
            _log.warning("cancel call to model '%s' failed: %s", request.model, exc.detail)
