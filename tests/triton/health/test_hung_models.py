"""A hung model does not answer although Triton is live and other models answer; tested with a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import DeadlineExceeded, ModelNotReady
from app.core.inference import Deadline, InferenceRequest
from app.triton.connect import open_transport
from app.triton.engine import TritonEngine
from app.triton.health import hang as hang_module
from app.triton.health import health as health_module
from app.triton.health.hang import HungModels
from app.triton.health.health import HealthByAddress, TritonHealth
from tests.toolkit.triton import FakeTriton, piece, serving
from tests.toolkit.watches import WITHIN_S, Samples, eventually, running


class Server(FakeTriton):
    """Models in ``silent`` do not answer; ``loads_needed`` loads of one end that."""

    def __init__(self) -> None:
        super().__init__(unary=self._unary, streamed=self._streamed, ready={"a": "READY", "b": "READY"})
        self.silent: set[str] = set()
        self.loads_needed: int | None = None

    def _is_silent(self, model: str) -> bool:
        if self.loads_needed is not None and self.control.count(f"+{model}") >= self.loads_needed:
            return False
        return model in self.silent

    async def _wait(self, model: str) -> None:
        while self._is_silent(model):
            await asyncio.sleep(0.01)

    async def _unary(self, request: pb.ModelInferRequest, context: object) -> pb.ModelInferResponse:
        await self._wait(request.model_name)
        return pb.ModelInferResponse()

    async def _streamed(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        await self._wait(request.model_name)
        yield piece(final=True)


class Watched:
    """A watch of a scripted server; ``restarts`` counts the restarts that the watch requested."""

    def __init__(self, server: Server, engine: TritonEngine, health: TritonHealth) -> None:
        self.server = server
        self.engine = engine
        self.health = health
        self.restarts = 0

    async def restart(self) -> None:
        self.restarts += 1
        self.server.silent = set()

    async def call(self, model: str, timeout_s: float = WITHIN_S, times: int = 1) -> None:
        for _ in range(times):
            with suppress(DeadlineExceeded):
                await self.engine.infer(InferenceRequest(model, ()), Deadline.after(timeout_s))

    @asynccontextmanager
    async def watching(
        self, *models: str, may_reload: bool = False, restarts: bool = False, **samples: Any
    ) -> AsyncIterator[None]:
        restart, canaries = self.restart if restarts else None, Samples(*models, **samples)
        watch = HungModels(self.engine, self.health, canaries, may_reload=may_reload, restart=restart)
        async with running(watch.run()):
            yield


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "SILENCE_S", 0.1)
    monkeypatch.setattr(hang_module, "HUNG_S", 0.25)
    monkeypatch.setattr(hang_module, "POLL_S", 0.01)


@asynccontextmanager
async def scripted() -> AsyncIterator[Watched]:
    async with serving(Server()) as server, open_transport(server.url) as channel:
        health = TritonHealth()
        assert isinstance(server, Server)
        watched = Watched(server, TritonEngine(channel, health=health), health)
        await watched.call("a")
        await watched.call("b")
        yield watched


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    async with scripted() as watched:
        yield watched


async def hang(watched: Watched, times: int = 2) -> None:
    watched.server.silent = {"a"}
    await watched.call("a", 0.05, times)


async def test_a_hung_model_is_not_ready_although_another_one_answers(watched: Watched) -> None:
    await hang(watched)
    async with watched.watching("a", "b"):
        await eventually(lambda: watched.health.hung_models == {"a"})
        await watched.call("b")
        assert not await watched.engine.model_ready("a")
        assert await watched.engine.model_ready("b")
        with pytest.raises(ModelNotReady):
            await watched.engine.infer(InferenceRequest("a", ()), Deadline.after(WITHIN_S))
        watched.server.silent = set()
        await eventually(lambda: not watched.health.hung_models)
        await watched.call("a")
        assert await watched.engine.model_ready("a")


async def test_a_reload_repairs_a_hung_model(watched: Watched) -> None:
    watched.server.loads_needed = 1
    await hang(watched)
    async with watched.watching("a", "b", may_reload=True, restarts=True):
        await eventually(lambda: watched.server.control == ["-a", "+a"] and not watched.health.hung_models)
    assert watched.restarts == 0


async def test_an_embedded_triton_is_restarted_if_a_reload_does_not_help(watched: Watched) -> None:
    await hang(watched)
    async with watched.watching("a", "b", may_reload=True, restarts=True):
        await eventually(lambda: watched.restarts == 1)
        await eventually(lambda: not watched.health.hung_models)
    assert (watched.server.control, watched.restarts) == (["-a", "+a"], 1)


async def test_restarts_that_do_not_help_are_not_repeated_at_once(watched: Watched) -> None:
    await hang(watched)

    async def restart() -> None:
        watched.restarts += 1

    watch = HungModels(watched.engine, watched.health, Samples("a", "b"), may_reload=False, restart=restart)
    async with running(watch.run()):
        await eventually(lambda: watched.restarts == 1)
        await asyncio.sleep(0.5)
    assert watched.restarts == 1


async def test_another_triton_is_reported_as_in_need_of_a_restart(watched: Watched) -> None:
    by_address = HealthByAddress({"here": watched.health})
    await hang(watched)
    assert not by_address.needs_restart
    async with watched.watching("a", "b"):
        await eventually(lambda: by_address.needs_restart)
        watched.server.silent = set()
        await eventually(lambda: not by_address.needs_restart)


WORKING = {
    "it answers again": (("a", "b"), True, 2),
    "no sample": (("b",), False, 5),
    "it never answered": (("never",), False, 5),
    "one timeout": (("a", "b"), False, 1),
}
"""The models with samples, whether the model answers again, and how many calls were not answered before."""


async def test_a_model_that_may_work_is_ready() -> None:
    async def judged(samples: tuple[str, ...], answers: bool, timeouts: int) -> object:
        async with scripted() as watched:
            await hang(watched, timeouts)
            watched.server.silent = set() if answers else {"a", "never"}
            async with watched.watching(*samples, may_reload=True, restarts=True):
                await asyncio.sleep(0.5)
            return watched.health.hung_models, watched.server.control, watched.restarts

    found = await asyncio.gather(*(judged(*each) for each in WORKING.values()))
    assert dict(zip(WORKING, found, strict=True)) == dict.fromkeys(WORKING, (set(), [], 0))


@asynccontextmanager
async def completing(server: Server, model: str, *, every_s: float, taking_s: float) -> AsyncIterator[None]:
    """The model completes requests of other callers, or abandoned ones."""

    async def complete() -> None:
        while True:
            await asyncio.sleep(every_s)
            server.completed_s.setdefault(model, []).append(taking_s)

    async with running(complete()):
        yield


async def is_repaired(watched: Watched, *, hangs: bool) -> bool:
    """Waits until the model is repaired; if it does not hang, for a while."""
    if hangs:
        await eventually(lambda: watched.server.control != [])
    else:
        await asyncio.sleep(1.0)
    return bool(watched.server.control or watched.restarts)


BUSY = {
    "it executes others": ("a", 0.05, 0.001, False),
    "it executes slow streams": ("decoupled", 0.05, 5.0, False),
    "it executes the canaries and sends nothing": ("decoupled", 0.01, 0.001, True),
}
"""The model, how often it completes a request, how long each takes, and whether the model hangs."""


async def test_a_busy_model_does_not_hang() -> None:
    async def judged(model: str, every_s: float, taking_s: float, hangs: bool) -> bool:
        async with scripted() as watched:
            await watched.call(model)
            watched.server.silent = {model}
            await watched.call(model, 0.05, 5)
            async with (
                completing(watched.server, model, every_s=every_s, taking_s=taking_s),
                watched.watching(model, may_reload=True, restarts=True),
            ):
                return await is_repaired(watched, hangs=hangs)

    found = await asyncio.gather(*(judged(*each) for each in BUSY.values()))
    assert dict(zip(BUSY, found, strict=True)) == {case: hangs for case, (*_, hangs) in BUSY.items()}


async def test_a_busy_step_explains_that_an_ensemble_does_not_answer() -> None:
    """The canary itself is completed by the first step, in no time."""

    async def judged(hangs: bool) -> bool:
        async with scripted() as watched:
            await hang(watched, 5)
            async with (
                completing(watched.server, "step", every_s=0.05, taking_s=0.001 if hangs else 5.0),
                watched.watching("a", steps={"a": {"step"}}, may_reload=True),
            ):
                return await is_repaired(watched, hangs=hangs)

    assert await asyncio.gather(judged(False), judged(True)) == [False, True]


async def test_a_slow_execution_is_not_interrupted(watched: Watched) -> None:
    """Several canaries time out until the model completes something: it is not ready, but not reloaded."""
    await hang(watched, 5)
    async with watched.watching("a", deadline_s=30.0, may_reload=True, restarts=True):
        await eventually(lambda: watched.health.hung_models == {"a"})
        await asyncio.sleep(0.5)
        assert watched.health.hung_models == {"a"}
        async with completing(watched.server, "a", every_s=0.05, taking_s=0.3):
            await eventually(lambda: not watched.health.hung_models)
        await watched.call("a", 0.05, 5)
        await asyncio.sleep(0.5)
        assert not watched.health.hung_models, "a shorter silence of this model is normal"
        await eventually(lambda: watched.health.hung_models == {"a"})
    assert (watched.server.control, watched.restarts) == ([], 0)


async def test_a_model_that_answers_other_calls_does_not_hang(watched: Watched) -> None:
    """Its canaries time out, and the short deadlines of other calls pass."""
    await hang(watched, 5)

    async def calls() -> None:
        while True:
            watched.health.progress.answered("a", "ModelInfer", 0.01)
            await watched.call("a", 0.05)

    async with running(calls()), watched.watching("a", "b", may_reload=True, restarts=True):
        await asyncio.sleep(1.0)
    assert (watched.health.hung_models, watched.server.control, watched.restarts) == (set(), [], 0)


async def test_a_server_without_statistics_is_not_judged(watched: Watched) -> None:
    await hang(watched, 5)
    watched.server.has_statistics = False
    async with watched.watching("a", may_reload=True, restarts=True):
        await asyncio.sleep(0.5)
    assert (watched.health.hung_models, watched.server.control, watched.restarts) == (set(), [], 0)
