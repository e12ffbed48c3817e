"""Engines without a server: one returns scripted answers and records its requests, one works on rows."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.core.engine import Document, InferenceServer
from app.core.errors import (
    ContractViolation,
    GatewayError,
    ModelError,
    ModelNotReady,
    UpstreamError,
    UpstreamUnavailable,
)
from app.core.inference import BYTES, Deadline, InferenceRequest, InferenceResponse, Tensor, bytes_array
from app.core.model import ModelConfig, ModelState
from tests.toolkit.numpy_models import NumpyEngine, NumpyModel

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

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        self._check_up()
        return {"version": "2.72.0"}

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


Outputs = dict[str, Tensor]
Distort = Callable[[Outputs], Outputs]


@dataclass
class RowEngine(NumpyEngine):
    """Answers the item ``i`` with ``-i`` and the text ``of i``.

    ``bad``: items that make the model fail. ``killers``: items that end its process. ``distort``: what a hostile model
    does with its outputs.
    """

    models: Mapping[str, NumpyModel] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    killers: set[int] = field(default_factory=set)
    service_s: float = 0.005
    version: str = "1"
    distort: Distort | None = None
    error: GatewayError | None = None
    """The error of every call."""

    def __post_init__(self) -> None:
        self.pause = lambda _: self.service_s

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each call."""
        return [len(items_of(call)) for call in self.requests]

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        await self._wait(request, deadline)
        return self._rows(items_of(request))

    def _rows(self, items: list[int]) -> InferenceResponse:
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


def rows_of(outputs: Outputs) -> list[int]:
    """The items that the outputs are about."""
    return [-int(each) for each in outputs["NEGATIVE"].array[:, 0]]


def with_rows(change: Callable[[list[int]], list[int]]) -> Distort:
    """Changes the rows of a call with several items."""
    return lambda outputs: outputs_of(change(items)) if len(items := rows_of(outputs)) > 1 else outputs


def without_text(outputs: Outputs) -> Outputs:
    """Only a call with one item has the output TEXT."""
    return outputs if len(rows_of(outputs)) == 1 else {"NEGATIVE": outputs["NEGATIVE"]}


def failed(message: str, code: str = "INTERNAL") -> GatewayError:
    error = ModelError("Model 'm' failed.")
    error.upstream = UpstreamError(code, message)
    return error


def died() -> GatewayError:
    error = ModelNotReady("The process of a model died.")
    error.upstream, error.was_answered = UpstreamError("INTERNAL", "Stub process 'm_0_0' is not healthy."), True
    return error


def error_of(kind: type[GatewayError], detail: str = "It failed.", **more: Any) -> GatewayError:
    return kind(detail, tensor="T") if issubclass(kind, ContractViolation) else kind(detail, **more)


def every_error(kind: type[GatewayError] = GatewayError) -> list[type[GatewayError]]:
    """Returns the errors with a code, by name: the order of the subclasses depends on that of the imports."""
    below = [each for child in kind.__subclasses__() for each in every_error(child)]
    return sorted([*([kind] if kind.code else []), *below], key=lambda each: each.__name__)
