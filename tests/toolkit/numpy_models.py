"""Models as functions of numpy arrays, and the engine that runs them: what the steps of a pipeline call in tests."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.core.engine import Engine
from app.core.errors import DeadlineExceeded
from app.core.inference import DTYPE_BY_DATATYPE, Array, Deadline, InferenceRequest, InferenceResponse, Tensor
from app.core.model import ModelConfig
from tests.toolkit.models import model

Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class NumpyModel:
    """``run``: the inputs of one item -> its outputs; of a decoupled model, the outputs of each response."""

    config: ModelConfig
    run: Callable[..., Any]


def numpy_model(
    name: str, inputs: list[str], outputs: list[str], run: Callable[..., Arrays | Iterable[Arrays]], **options: Any
) -> NumpyModel:
    """``inputs`` and ``outputs``: as in :func:`tests.toolkit.models.model`."""
    return NumpyModel(model(inputs, outputs, name=name, **options), run)


@dataclass
class NumpyEngine(Engine):
    """``pause``: how long a model takes, in seconds."""

    models: Mapping[str, NumpyModel]
    pause: Callable[[str], float] = lambda _: 0.0
    requests: list[InferenceRequest] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    cancelled: list[str] = field(default_factory=list)

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        found = self.models[request.model]
        await self._wait(request, deadline)
        arrays = {each.name: each.array for each in request.inputs}
        if not found.config.max_batch_size:
            return self._response(found, request, found.run(**arrays))
        rows = len(next(iter(arrays.values())))
        assert rows <= found.config.max_batch_size
        items = [found.run(**{name: each[row] for name, each in arrays.items()}) for row in range(rows)]
        return self._response(found, request, {name: np.stack([each[name] for each in items]) for name in items[0]})

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        found = self.models[request.model]
        for outputs in found.run(**{each.name: each.array for each in request.inputs}):
            await self._wait(request, deadline)
            try:
                yield self._response(found, request, outputs)
            except GeneratorExit:
                self.cancelled.append(request.model)
                raise

    async def _wait(self, request: InferenceRequest, deadline: Deadline) -> None:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.sleep(self.pause(request.model))
        except TimeoutError as exc:
            raise DeadlineExceeded(f"Model '{request.model}' is late.") from exc
        except asyncio.CancelledError:
            self.cancelled.append(request.model)
            raise
        finally:
            self.running -= 1

    @staticmethod
    def _response(found: NumpyModel, request: InferenceRequest, outputs: Arrays) -> InferenceResponse:
        datatypes = {each.name: each.datatype for each in found.config.outputs}
        wanted = {each.name for each in request.outputs} or outputs.keys()
        tensors = {
            name: Tensor(name, datatypes[name], np.asarray(array, DTYPE_BY_DATATYPE[datatypes[name]]))
            for name, array in outputs.items()
            if name in wanted
        }
        return InferenceResponse(tensors, is_final=not found.config.decoupled)


class FreeSlots:
    """Slots that are always free, with the number that is taken."""

    def __init__(self) -> None:
        self.taken = 0

    async def enter(self, _step: object, _deadline: Deadline) -> "FreeSlots":
        self.taken += 1
        return self

    def leave(self, _error: BaseException | None = None) -> None:
        self.taken -= 1
