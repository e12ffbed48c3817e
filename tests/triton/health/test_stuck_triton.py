"""A stuck Triton is live but answers no inference calls; tested with a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import DeadlineExceeded, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest
from app.triton.connect import open_transport
from app.triton.engine import TritonEngine
from app.triton.health import hang
from app.triton.health import health as health_module
from app.triton.health.hang import StuckWatch
from app.triton.health.health import TritonHealth
from tests.toolkit.triton import FakeTriton, piece, serving
from tests.toolkit.watches import WITHIN_S, Samples, eventually, running


class Server(FakeTriton):
    """Answers both methods, unless a model is in ``silent``."""

    def __init__(self) -> None:
        super().__init__(unary=self._unary, streamed=self._streamed)
        self.silent: set[str] = set()
        self.silent_streams = False

    async def _unary(self, request: pb.ModelInferRequest, context: object) -> pb.ModelInferResponse:
        await self._wait(request)
        return pb.ModelInferResponse()

    async def _streamed(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        while self.silent_streams:
            await asyncio.sleep(0.01)
        await self._wait(request)
        yield piece(final=True)

    async def _wait(self, request: pb.ModelInferRequest) -> None:
        while request.model_name in self.silent:
            await asyncio.sleep(0.01)


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

    async def answer_once(self, *models: str) -> None:
        for model in models:
            await self.engine.infer(InferenceRequest(model, ()), Deadline.after(WITHIN_S))

    async def time_out(self, model: str, times: int = 2) -> None:
        for _ in range(times):
            with suppress(DeadlineExceeded):
                await self.engine.infer(InferenceRequest(model, ()), Deadline.after(0.05))

    @asynccontextmanager
    async def watching(self, *models: str, restarts: bool = False) -> AsyncIterator[None]:
        watch = StuckWatch(
            self.engine, self.health.progress, Samples(*models), restart=self.restart if restarts else None
        )
        async with running(watch.run()):
            yield


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "SILENCE_S", 0.1)
    monkeypatch.setattr(hang, "HUNG_S", 0.25)
    monkeypatch.setattr(hang, "POLL_S", 0.01)
    monkeypatch.setattr(hang, "FIRST_DELAY_S", 0.01)


@asynccontextmanager
async def scripted() -> AsyncIterator[Watched]:
    async with serving(Server()) as server, open_transport(server.url) as channel:
        health = TritonHealth()
        assert isinstance(server, Server)
        yield Watched(server, TritonEngine(channel, health=health), health)


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    async with scripted() as watched:
        yield watched


async def test_a_stuck_triton_is_not_live_until_it_answers(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    await watched.answer_once("a", "b")
    watched.server.silent = {"a", "b"}
    await watched.time_out("a")
    async with watched.watching("a", "b"):
        await eventually(lambda: watched.health.progress.is_stuck)
        assert await watched.engine.answers()
        assert not await watched.engine.is_live()
        watched.server.silent = set()
        await eventually(lambda: not watched.health.progress.is_stuck)
        assert await watched.engine.is_live()
    assert caplog.text.count("Triton is stuck") == 1


async def test_stuck_streams_are_detected_despite_unary_answers(watched: Watched) -> None:
    await watched.answer_once("a")
    watched.server.silent = {"a"}
    for _ in range(2):
        with suppress(DeadlineExceeded):
            await anext(watched.engine.infer_stream(InferenceRequest("a", ()), Deadline.after(0.05)))
    async with watched.watching("a"):
        await eventually(lambda: watched.health.progress.is_stuck)


async def test_stuck_streams_are_detected_during_unary_answers(watched: Watched) -> None:
    await watched.answer_once("a")
    watched.server.silent_streams = True
    for _ in range(2):
        with suppress(DeadlineExceeded):
            await anext(watched.engine.infer_stream(InferenceRequest("a", ()), Deadline.after(0.05)))

    async def calls() -> None:
        while True:
            with suppress(UpstreamUnavailable):  # the answer once Triton is known to be stuck
                await watched.answer_once("a")
            await asyncio.sleep(0.01)

    async with running(calls()), watched.watching("a"):
        await eventually(lambda: watched.health.progress.is_stuck)


async def test_an_embedded_triton_is_restarted(watched: Watched) -> None:
    await watched.answer_once("a")
    watched.server.silent = {"a"}
    await watched.time_out("a")
    async with watched.watching("a", restarts=True):
        await eventually(lambda: watched.restarts == 1)
        await eventually(lambda: not watched.health.progress.is_stuck)
    assert watched.restarts == 1


WORKING = {
    "another model answers": (("a", "b"), {"a"}, 2),
    "the model answers again": (("a",), set[str](), 2),
    "no sample": ((), {"a"}, 2),
    "a model that never answered": (("never",), {"a", "never"}, 2),
    "a decoupled model": (("decoupled",), {"a", "decoupled"}, 2),
    "one timeout": (("a",), {"a"}, 1),
}
"""The models with samples, those that do not answer, and how many calls were not answered before."""


async def test_a_triton_that_may_work_is_not_restarted() -> None:
    async def judged(samples: tuple[str, ...], silent: set[str], timeouts: int) -> object:
        async with scripted() as watched:
            await watched.answer_once("a", "b", "decoupled")
            watched.server.silent = {"a"}
            await watched.time_out("a", timeouts)
            watched.server.silent = silent
            async with watched.watching(*samples, restarts=True):
                await asyncio.sleep(0.5)
            return watched.health.progress.is_stuck, watched.restarts

    found = await asyncio.gather(*(judged(*each) for each in WORKING.values()))
    assert dict(zip(WORKING, found, strict=True)) == dict.fromkeys(WORKING, (False, 0))


async def test_an_unreachable_triton_is_not_stuck(watched: Watched) -> None:
    await watched.answer_once("a")
    watched.server.silent = {"a"}
    await watched.time_out("a")
    async with open_transport("127.0.0.1:1") as channel:
        watched.engine = TritonEngine(channel, health=watched.health)
        async with watched.watching("a", restarts=True):
            await asyncio.sleep(0.3)
    assert (watched.health.progress.is_stuck, watched.restarts) == (False, 0)


async def test_a_busy_triton_is_not_restarted(watched: Watched) -> None:
    """Its only model executes requests that nobody waits for any more."""
    await watched.answer_once("a")
    watched.server.silent = {"a"}
    await watched.time_out("a")

    async def complete() -> None:
        while True:
            await asyncio.sleep(0.05)
            watched.server.completed_s.setdefault("a", []).append(0.05)

    async with running(complete()), watched.watching("a", restarts=True):
        await asyncio.sleep(1.0)
    assert (watched.health.progress.is_stuck, watched.restarts) == (False, 0)


async def test_a_triton_is_not_stuck_while_a_request_may_take_longer(watched: Watched) -> None:
    await watched.answer_once("a")
    watched.server.silent = {"a"}
    await watched.time_out("a")
    watch = StuckWatch(watched.engine, watched.health.progress, Samples("a", deadline_s=30.0), restart=watched.restart)
    async with running(watch.run()):
        await asyncio.sleep(1.0)
    assert (watched.health.progress.is_stuck, watched.restarts) == (False, 0)


async def test_an_answered_call_clears_the_suspicion(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        health_module, "SILENCE_S", 0.5
    )  # much longer than the time between two answers, even on a slow machine
    await watched.answer_once("a")
    watched.server.silent = {"a"}
    await watched.time_out("a")
    async with watched.watching("a", restarts=True):
        await asyncio.sleep(0.1)  # until the watch sends the probe
        for _ in range(60):
            await watched.answer_once("b")
            await asyncio.sleep(0.02)
    assert (watched.health.progress.is_stuck, watched.restarts) == (False, 0)
