"""A scripted engine whose model works on rows: each row of an answer says which item it belongs to."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.core.engine import InferenceServer
from app.core.errors import DeadlineExceeded, GatewayError, ModelError, ModelNotReady, UpstreamError
from app.core.inference import BYTES, Deadline, InferenceRequest, InferenceResponse, Tensor, bytes_array

Outputs = dict[str, Tensor]
Distort = Callable[[Outputs], Outputs]


@dataclass
class RowEngine(InferenceServer):
    """Answers the item ``i`` with ``-i`` and the text ``of i``.

    ``bad``: items that make the model fail. ``killers``: items that end its process. ``distort``: what a hostile model
    does with its outputs.
    """

    bad: set[int] = field(default_factory=set)
    killers: set[int] = field(default_factory=set)
    service_s: float = 0.005
    version: str = "1"
    distort: Distort | None = None
    error: GatewayError | None = None
    """The error of every call."""
    calls: list[InferenceRequest] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    most_running: int = 0

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each call."""
        return [len(items_of(call)) for call in self.calls]

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        self.calls.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(min(self.service_s, max(deadline.remaining_s(), 0.0)))
            if deadline.has_passed:
                raise DeadlineExceeded("The model did not answer before the deadline.")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return self._response(items_of(request))

    def _response(self, items: list[int]) -> InferenceResponse:
        if self.error is not None:
            raise self.error
        if self.killers & set(items):
            raise died()
        if found := sorted(self.bad & set(items)):
            raise failed(f"item {found[0]} is bad")
        outputs = outputs_of(items)
        return InferenceResponse(self.distort(outputs) if self.distort else outputs, version=self.version)


def items_of(request: InferenceRequest) -> list[int]:
    return [int(item) for item in request.inputs[0].array[:, 0]]


def outputs_of(items: list[int]) -> Outputs:
    return {
        "NEGATIVE": Tensor("NEGATIVE", "INT64", np.array([[-item] for item in items], np.int64)),
        "TEXT": Tensor("TEXT", BYTES, bytes_array([b"of %d" % item for item in items], (len(items), 1))),
    }


def failed(message: str, code: str = "INTERNAL") -> GatewayError:
    error = ModelError("Model 'm' failed.")
    error.upstream = UpstreamError(code, message)
    return error


def died() -> GatewayError:
    error = ModelNotReady("The process of a model died.")
    error.upstream, error.was_answered = UpstreamError("INTERNAL", "Stub process 'm_0_0' is not healthy."), True
    return error
