"""The gateway's application as in `serve`, with an engine that answers at once, and its log on /dev/null."""

import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from app.api.bodies import Limits
from app.api.call import Inference
from app.api.idempotency.idempotency_layer import Idempotency
from app.core.engine import Document, InferenceServer
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, Tensor
from app.core.model import ModelConfig, ModelState, TensorSpec
from app.observability.log import configure_logging
from app.observability.metrics import Metrics
from app.pipelines.catalog import Catalog
from app.pipelines.pipeline import Pipeline
from app.routes import Gateway, create_app
from app.streams.store import MemoryStore

MODEL = ModelConfig(
    name="identity",
    backend="python",
    max_batch_size=0,
    inputs=(TensorSpec("INPUT", "FP32", (-1,)),),
    outputs=(TensorSpec("OUTPUT", "FP32", (-1,)),),
)


class IdentityEngine(InferenceServer):
    """An engine with one model, which returns its input at once."""

    async def is_live(self) -> bool:
        return True

    async def models(self) -> Sequence[ModelState]:
        return [ModelState(MODEL.name, "1", ready=True)]

    async def model_ready(self, model: str, version: str = "") -> bool:
        return model == MODEL.name

    async def model_config(self, model: str, version: str = "") -> ModelConfig:
        return MODEL

    async def document(self, document: Document, model: str, version: str = "") -> Mapping[str, Any]:
        return {}

    async def infer(self, request: InferenceRequest, deadline: Deadline) -> InferenceResponse:
        return InferenceResponse({"OUTPUT": Tensor("OUTPUT", "FP32", request.inputs[0].array)})

    async def infer_stream(self, request: InferenceRequest, deadline: Deadline) -> AsyncGenerator[InferenceResponse]:
        yield await self.infer(request, deadline)


@dataclass(frozen=True)
class Served:
    app: ASGIApp
    pipeline: Pipeline
    engine: InferenceServer
    metrics: Metrics


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    """Metrics, limits, disconnect watch and one JSON line for each request are on."""
    engine, metrics = IdentityEngine(), Metrics("benchmark")
    catalog = Catalog(engine)
    catalog.load_file()
    await catalog.refresh()
    await catalog.warm_up()
    with log_on_dev_null():
        async with MemoryStore() as store:
            inference = Inference(engine, catalog, metrics)
            gateway = Gateway(inference, store, Limits(64 * 1024 * 1024), layers=[Idempotency()])
            app = create_app(gateway, admin_port=8081)
            yield Served(app, catalog.pipeline(MODEL.name), engine, metrics)


@contextlib.contextmanager
def log_on_dev_null() -> Iterator[None]:
    """Configures the log as `serve` does, with level info, on /dev/null. Restores the previous handlers at the end."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with Path(os.devnull).open("w") as sink, contextlib.redirect_stderr(sink):
        writer = configure_logging("info", "json")
        try:
            yield
        finally:
            writer.flush()
            root.handlers[:] = handlers
            root.setLevel(level)
