"""A busy engine is silent until its first outputs: no watch may take it for a stuck one. With a real gRPC server."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.engine import discard_stream
from app.core.errors import GatewayError
from app.core.inference import Deadline, InferenceRequest
from app.triton.connect import open_transport
from app.triton.engine import TritonEngine
from app.triton.health import hang as hang_module
from app.triton.health import health as health_module
from app.triton.health import lost_streams as lost_streams_module
from app.triton.health.canaries import BreakerProbes
from app.triton.health.declarations import NoDeclarations
from app.triton.health.hang import HungModels, StuckWatch
from app.triton.health.health import Progress, TritonHealth
from app.triton.health.lost_streams import LostStreams
from tests.toolkit.triton import FakeTriton, piece, serving
from tests.toolkit.watches import WITHIN_S, Samples, eventually, running

LLM = "decoupled"
RUNNING = 200
CANARY_S = 0.1
"""The timeout of a canary."""


class Server(FakeTriton):
    """An engine that answers nothing until ``works`` is set."""

    def __init__(self) -> None:
        super().__init__(streamed=self._streamed, ready={LLM: "READY"})
        self.works = asyncio.Event()
        self.waiting = 0

    async def _streamed(
        self, request: pb.ModelInferRequest, context: object
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        self.waiting += 1
        try:
            await self.works.wait()
        finally:
            self.waiting -= 1
        yield piece(final=True)


class FirstOutput(NoDeclarations):
    def __init__(self, first_output_s: float) -> None:
        self._first_output_s = first_output_s

    def first_output_s(self, model: str) -> float:
        return self._first_output_s


class Busy:
    """200 requests wait in the engine, and every watch looks."""

    def __init__(self, server: Server, engine: TritonEngine, health: TritonHealth) -> None:
        self.server = server
        self.engine = engine
        self.health = health

    @property
    def is_declared(self) -> bool:
        return bool(self.health.hung_models or self.health.breakers.open or self.health.progress.is_stuck)

    async def call(self, timeout_s: float = WITHIN_S) -> None:
        with suppress(GatewayError):
            await discard_stream(self.engine, InferenceRequest(LLM, ()), Deadline.after(timeout_s))

    @asynccontextmanager
    async def with_requests(self) -> AsyncIterator[None]:
        self.server.works.clear()
        tasks = [asyncio.create_task(self.call()) for _ in range(RUNNING)]
        try:
            await eventually(lambda: self.server.waiting >= RUNNING)
            yield
        finally:
            self.server.works.set()
            await asyncio.gather(*tasks)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "SILENCE_S", CANARY_S)
    monkeypatch.setattr(health_module, "LEAST_TIMEOUT_S", CANARY_S)
    monkeypatch.setattr(hang_module, "POLL_S", 0.01)
    monkeypatch.setattr(lost_streams_module, "CANARY_S", CANARY_S)
    monkeypatch.setattr(lost_streams_module, "POLL_S", 0.01)


@asynccontextmanager
async def busy(first_output_s: float, *, all_watches: bool = True) -> AsyncIterator[Busy]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(Server()))
        assert isinstance(server, Server)
        channel = await stack.enter_async_context(open_transport(server.url))
        health = TritonHealth(declared=FirstOutput(first_output_s))
        engine = TritonEngine(channel, health=health)
        each = Busy(server, engine, health)
        server.works.set()
        await each.call()
        samples = Samples(LLM, deadline_s=WITHIN_S)
        await stack.enter_async_context(running(BreakerProbes(engine, health.breakers, samples).run()))
        if all_watches:
            hung = HungModels(engine, health, samples, may_reload=False)
            stuck = StuckWatch(engine, health.progress, samples)
            lost = LostStreams(engine, health, samples)
            for watch in (hung.run(), stuck.run(), lost.run()):
                await stack.enter_async_context(running(watch))
        await stack.enter_async_context(each.with_requests())
        yield each


async def test_a_busy_engine_is_not_declared_stuck() -> None:
    """Callers and canaries time out behind 200 requests that are within their time until the first output."""
    async with busy(first_output_s=3600) as engine:
        for _ in range(10):
            await engine.call(2 * CANARY_S)
        assert engine.health.progress.unanswered["ModelStreamInfer"] > health_module.FAILURES
        assert not engine.is_declared
        assert await engine.engine.model_ready(LLM)
    await engine.call()
    assert not engine.is_declared


async def test_a_stuck_engine_is_declared_after_its_first_output_time() -> None:
    first_output_s = 4 * CANARY_S
    began = time.monotonic()
    async with busy(first_output_s) as engine:
        while not engine.is_declared:
            await engine.call(2 * CANARY_S)
        assert time.monotonic() - began >= first_output_s


async def test_without_a_declared_time_an_engine_is_declared_as_before() -> None:
    async with busy(first_output_s=0) as engine:
        while not engine.is_declared:
            await engine.call(2 * CANARY_S)


async def test_an_open_breaker_closes_if_the_canary_waits_but_requests_are_answered() -> None:
    async with busy(first_output_s=0, all_watches=False) as engine:
        breakers = engine.health.breakers
        while LLM not in breakers.open:
            await engine.call(2 * CANARY_S)
        breakers.answered(LLM, 0.01)
        await eventually(lambda: LLM not in breakers.open)


class TestSilence:
    """How long a model has been silent: waits at the same time count once, and time without calls does not count."""

    def test_calls_at_the_same_time_count_once(self) -> None:
        silence = health_module.Silence()
        for (began, ended), waited_s in {(0, 10): 10, (2, 11): 11, (5, 6): 11}.items():
            silence.add(began, ended)
            assert silence.waited_s == waited_s

    def test_time_without_calls_does_not_count(self) -> None:
        silence = health_module.Silence()
        silence.add(0, 10)
        silence.add(100, 110)
        assert silence.waited_s == 20

    def test_an_answer_ends_it(self) -> None:
        progress = Progress(declared=FirstOutput(3600))
        progress.unanswered_since(LLM, "ModelInfer", 0.0)
        progress.answered(LLM, "ModelInfer", 0.1)
        assert not progress.may_be_busy(LLM)
