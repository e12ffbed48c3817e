"""A scripted Triton with the watch of its health, and ways to wait."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from app.core.engine import discard_stream
from app.core.errors import GatewayError
from app.core.inference import Deadline, InferenceRequest
from app.triton.connect import Kind, open_transport
from app.triton.health.health import ModelDeclaration, ModelFault, TritonHealth
from app.triton.health.health_watch import Canary, HealthWatch
from app.triton.triton_engine import TritonEngine
from tests.toolkit.triton import FakeTriton, piece, serving

WITHIN_S = 30.0


class Samples:
    """A canary for each model; only the model ``decoupled`` is decoupled."""

    def __init__(self, *models: str, deadline_s: float = 0.0) -> None:
        self.models = models
        self.deadline_s = deadline_s

    def __call__(self) -> dict[str, Canary]:
        return {model: self._canary(model) for model in self.models}

    def _canary(self, model: str) -> Canary:
        return Canary(InferenceRequest(model, (), is_probe=True), model == "decoupled", self.deadline_s)


class ScriptedTriton(FakeTriton):
    """Models are silent, or fail with a message, until they are loaded ``loads_needed`` times."""

    def __init__(self) -> None:
        super().__init__(unary=self._unary, streamed=self._streamed, ready=dict.fromkeys("ab", "READY"))
        self.silent: set[str] = set()
        self.silent_streams = False
        self.message = ""
        """The error of every model that is not repaired; empty: they answer."""
        self.loads_needed: int | None = None
        """None: loads do not help."""
        self.waiting = 0

    def _is_repaired(self, model: str) -> bool:
        return self.loads_needed is not None and self.control.count(f"+{model}") >= self.loads_needed

    async def _wait(self, model: str, *, streamed: bool = False) -> None:
        self.waiting += 1
        try:
            while not self._is_repaired(model) and (model in self.silent or (streamed and self.silent_streams)):
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1

    async def _unary(self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        await self._wait(request.model_name)
        if self.message and not self._is_repaired(request.model_name):
            await context.abort(grpc.StatusCode.INTERNAL, self.message)
        return pb.ModelInferResponse()

    async def _streamed(
        self, request: pb.ModelInferRequest, context: object
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        await self._wait(request.model_name, streamed=True)
        fails = self.message and not self._is_repaired(request.model_name)
        yield pb.ModelStreamInferResponse(error_message=self.message) if fails else piece(final=True)


class Watched:
    """An engine over a scripted Triton. ``restarts``: how many the watch requested."""

    def __init__(self, server: Any, engine: TritonEngine, health: TritonHealth) -> None:
        self.server = server
        self.engine = engine
        self.health = health
        self.changes: list[tuple[ModelFault, str, int]] = []
        """The faults that began (1) and ended (-1)."""
        health.changed = lambda *change: self.changes.append(change)
        self.restarts = 0
        self.restart_helps = True

    async def restart(self) -> None:
        self.restarts += 1
        if self.restart_helps:
            self.server.silent = set()

    async def call(
        self, model: str = "a", timeout_s: float = WITHIN_S, times: int = 1, *, streamed: bool = False
    ) -> GatewayError | None:
        """Returns the last error."""
        error = None
        for _ in range(times):
            request, deadline, error = InferenceRequest(model, ()), Deadline.after(timeout_s), None
            try:
                await (discard_stream if streamed else TritonEngine.infer)(self.engine, request, deadline)
            except GatewayError as exc:
                error = exc
        return error

    @asynccontextmanager
    async def watching(
        self, *models: str, may_reload: bool = False, restarts: bool = False, **samples: Any
    ) -> AsyncIterator[None]:
        self.health.may_reload = may_reload
        restart = self.restart if restarts else None
        async with running(HealthWatch(self.engine, self.health, Samples(*models, **samples), restart).run()):
            yield

    @property
    def begun(self) -> list[tuple[ModelFault, str]]:
        return [(fault, model) for fault, model, change in self.changes if change > 0]

    @property
    def hung(self) -> list[str]:
        return self.health.with_fault(ModelFault.HUNG)

    @property
    def dead(self) -> list[str]:
        return self.health.with_fault(ModelFault.PROCESS, ModelFault.ENGINE)


@asynccontextmanager
async def watched_triton(
    server: FakeTriton | None = None, declared: ModelDeclaration | None = None, kind: Kind = "asyncio"
) -> AsyncIterator[Watched]:
    health = TritonHealth(lambda _: declared or ModelDeclaration())
    async with serving(server or ScriptedTriton()) as triton, open_transport(triton.url, kind=kind) as channel:
        engine = TritonEngine(channel, health=health)
        yield Watched(triton, engine, health)
        await engine.close()


@asynccontextmanager
async def running(watch: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(watch)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
