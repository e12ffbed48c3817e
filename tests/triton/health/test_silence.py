"""What the end of a call says about its model; models and Tritons that answer nothing, or are only busy."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest

from app.core.errors import DeadlineExceeded, ModelNotReady, UpstreamUnavailable
from app.core.inference import InferenceRequest, InferenceResponse
from app.core.model import ModelConfig, Step
from app.triton import triton_engine as engine_module
from app.triton.connect import open_transport
from app.triton.health import health as health_module
from app.triton.health import health_watch as watch_module
from app.triton.health.health import (
    FAILURES,
    SILENCE_S,
    ModelDeclaration,
    ModelFault,
    TritonHealth,
    needs_restart,
)
from app.triton.triton_engine import TritonEngine, WatchedCall
from tests.toolkit.waiting import until
from tests.toolkit.watches import ScriptedTriton, Watched, running, watched_triton

REQUEST = InferenceRequest("m", ())
METHOD = "ModelInfer"
RESPONSE = InferenceResponse({})


@pytest.fixture
def health() -> TritonHealth:
    return TritonHealth()


def called(health: TritonHealth, method: str = METHOD, timeout_s: float = math.inf) -> WatchedCall:
    return WatchedCall(REQUEST, method, timeout_s, (), health)


@pytest.mark.parametrize(
    ("code", "has_response", "silence_s", "unanswered"),
    [
        ("DEADLINE_EXCEEDED", False, SILENCE_S, 1),
        *[(code, False, SILENCE_S, 0) for code in ("CANCELLED", "UNAVAILABLE", "INTERNAL", "OK", "UNKNOWN")],
        ("DEADLINE_EXCEEDED", True, SILENCE_S, 0),
        ("DEADLINE_EXCEEDED", True, 0.0, 1),
        ("CANCELLED", True, 0.0, 1),
        ("UNAVAILABLE", True, 0.0, 0),
    ],
)
def test_a_call_is_unanswered_after_a_timeout_or_a_long_silence(
    monkeypatch: pytest.MonkeyPatch, code: str, has_response: bool, silence_s: float, unanswered: int
) -> None:
    monkeypatch.setattr(engine_module, "SILENCE_S", silence_s)
    health = TritonHealth()
    call = called(health)
    if has_response:
        call.response(RESPONSE)
    call.ended(code, None)
    assert health.calls_of("m", METHOD).unanswered == unanswered


def test_a_response_resets_the_count_of_its_method(health: TritonHealth) -> None:
    for method in (METHOD, "ModelStreamInfer"):
        for _ in range(3):
            called(health, method).ended("DEADLINE_EXCEEDED", None)
        assert health.calls_of("m", method).unanswered == 3
    called(health).response(RESPONSE)
    assert [health.calls_of("m", method).unanswered for method in (METHOD, "ModelStreamInfer")] == [0, 3]


@pytest.mark.parametrize(("together_s", "answers"), [(60.0, 1), (0.0, 3)])
def test_responses_that_arrive_together_are_one_answer(
    health: TritonHealth, monkeypatch: pytest.MonkeyPatch, together_s: float, answers: int
) -> None:
    monkeypatch.setattr(engine_module, "_TOGETHER_S", together_s)
    call, heard_at = called(health), set[float]()
    for _ in range(3):
        call.response(RESPONSE)
        heard_at.add(health.calls_of("m", METHOD).heard_at)
    assert len(heard_at) == answers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only item is the time."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_timeout_of_a_canary_follows_the_longest_wait(health: TritonHealth, clock: list[float]) -> None:
    model = health.models["m"]
    assert (model.recent_s, model.canary_s) == (0.0, health_module.SILENCE_S)
    for waited_s in (40.0, 0.1):
        call = called(health)
        clock[0] += waited_s
        call.response(RESPONSE)
    assert model.recent_s
    assert model.canary_s == 120.0


def test_a_deadline_that_a_busy_gateway_noticed_late_does_not_open_the_breaker(
    health: TritonHealth, clock: list[float]
) -> None:
    for _ in range(2 * FAILURES):
        call = called(health, timeout_s=0.05)
        clock[0] += 30.0
        call.ended("DEADLINE_EXCEEDED", DeadlineExceeded("The deadline passed."))
    assert not health.faults


@pytest.mark.parametrize(
    ("waits", "silent_s"),
    [([(0, 10)], 10), ([(0, 10), (2, 11), (5, 6)], 11), ([(0, 10), (100, 110)], 20)],
    ids=["one", "waits at the same time count once", "time without calls does not count"],
)
def test_a_model_is_silent_until_an_answer(
    clock: list[float], waits: list[tuple[float, float]], silent_s: float
) -> None:
    health = TritonHealth(lambda _: ModelDeclaration(first_output_s=3600))
    calls = health.calls_of("m", METHOD)
    for began, ended in waits:
        clock[0] = began
        call = called(health)
        clock[0] = ended
        call.ended("DEADLINE_EXCEEDED", None)
    assert (calls.silent_s, health.may_be_busy("m", calls)) == (silent_s, True)
    called(health).response(RESPONSE)
    assert (calls.silent_s, health.may_be_busy("m", calls)) == (0.0, False)


SHORT_S = 0.05
"""A deadline that passes before a silent model answers."""


@asynccontextmanager
async def silent(*models: str, timeouts: int = 0, streamed: bool = False) -> AsyncIterator[Watched]:
    """Models ``a``, ``b`` and ``decoupled`` have answered. Then ``models`` are silent; calls of ``a`` time out."""
    async with watched_triton() as triton:
        for model in ("a", "b"):
            await triton.call(model)
        await triton.call("decoupled", streamed=True)
        triton.server.silent = set(models)
        await triton.call("a", SHORT_S, timeouts, streamed=streamed)
        yield triton


class TestHungModels:
    async def test_a_hung_model_is_not_ready_although_another_one_answers(self) -> None:
        async with silent("a", timeouts=2) as triton, triton.watching("a", "b"):
            await until(lambda: triton.hung == ["a"])
            assert await triton.call("b") is None
            assert not await triton.engine.model_ready("a")
            assert await triton.engine.model_ready("b")
            assert isinstance(await triton.call("a"), ModelNotReady)
            triton.server.silent = set()
            await until(lambda: not triton.hung)
            assert await triton.call("a") is None
            assert await triton.engine.model_ready("a")

    @pytest.mark.parametrize(("loads_needed", "restarts"), [(1, 0), (None, 1)], ids=["by a reload", "by a restart"])
    async def test_a_hung_model_is_repaired(self, loads_needed: int | None, restarts: int) -> None:
        """The embedded Triton is restarted if a reload does not help."""
        async with silent("a", timeouts=2) as triton, triton.watching("a", "b", may_reload=True, restarts=True):
            triton.server.loads_needed = loads_needed
            await until(lambda: triton.hung == ["a"])
            await until(lambda: not triton.hung)
            assert (triton.server.control, triton.restarts) == (["-a", "+a"], restarts)
            assert not triton.health.is_stuck

    async def test_restarts_that_do_not_help_are_not_repeated_at_once(self) -> None:
        async with silent("a", timeouts=2) as triton, triton.watching("a", "b", restarts=True):
            triton.restart_helps = False
            await until(lambda: triton.restarts == 1)
            await asyncio.sleep(0.5)
            assert triton.restarts == 1

    async def test_another_triton_is_reported_as_in_need_of_a_restart(self) -> None:
        async with silent("a", timeouts=2) as triton:
            by_address = {"here": triton.health}
            assert not needs_restart(by_address)
            async with triton.watching("a", "b"):
                await until(lambda: needs_restart(by_address))
                triton.server.silent = set()
                await until(lambda: not needs_restart(by_address))

    async def test_a_slow_execution_is_not_interrupted(self) -> None:
        """Several canaries time out until the model completes something: it is not ready, but not reloaded."""
        async with silent("a", timeouts=5) as triton:
            async with triton.watching("a", deadline_s=30.0, may_reload=True, restarts=True):
                await until(lambda: triton.hung == ["a"])
                await asyncio.sleep(0.5)
                assert triton.hung == ["a"]
                async with completing(triton.server, "a", taking_s=0.3):
                    await until(lambda: not triton.hung)
                await triton.call("a", SHORT_S, 5)
                await asyncio.sleep(0.5)
                assert not triton.hung, "a shorter silence of this model is normal"
                await until(lambda: triton.hung == ["a"])
            assert (triton.server.control, triton.restarts) == ([], 0)


class TestStuckTritons:
    async def test_a_stuck_triton_is_not_live_until_it_answers(self, caplog: pytest.LogCaptureFixture) -> None:
        async with silent("a", "b", timeouts=2) as triton, triton.watching("a", "b"):
            await until(lambda: triton.health.is_stuck)
            assert await triton.engine.answers()
            assert not await triton.engine.is_live()
            error = await triton.call("decoupled", streamed=True)  # would be answered
            assert isinstance(error, UpstreamUnavailable)
            assert not error.was_sent
            triton.server.silent = set()
            await until(lambda: not triton.health.is_stuck)
            assert await triton.engine.is_live()
            assert caplog.text.count("Triton is stuck") == 1
        async with silent("a", timeouts=2) as triton, triton.watching("a", restarts=True):
            await until(lambda: triton.restarts == 1)  # the embedded Triton
            await until(lambda: not triton.health.is_stuck)
            assert triton.restarts == 1

    async def test_stuck_streams_are_detected_during_unary_answers(self) -> None:
        async def calls() -> None:
            while True:
                error = await triton.call("a")
                assert error is None or isinstance(error, ModelNotReady | UpstreamUnavailable)
                await asyncio.sleep(0.01)

        async with silent() as triton:
            triton.server.silent_streams = True
            await triton.call("a", SHORT_S, 2, streamed=True)
            async with running(calls()), triton.watching("a"):
                await until(lambda: triton.health.is_stuck)

    async def test_a_model_without_a_sample_makes_the_others_suspects(self) -> None:
        async with silent("a", "b", timeouts=2) as triton, triton.watching("b"):
            await until(lambda: triton.health.is_stuck)

    async def test_an_unreachable_triton_is_not_stuck(self) -> None:
        async with silent("a", timeouts=2) as triton, open_transport("127.0.0.1:1") as channel:
            triton.engine = TritonEngine(channel, health=triton.health)
            async with triton.watching("a", restarts=True):
                await asyncio.sleep(0.3)
            assert (triton.health.is_stuck, triton.restarts) == (False, 0)

    async def test_a_triton_is_not_stuck_while_a_request_may_take_longer(self) -> None:
        async with silent("a", timeouts=2) as triton, triton.watching("a", deadline_s=30.0, restarts=True):
            await asyncio.sleep(1.0)
            assert (triton.health.is_stuck, triton.restarts) == (False, 0)


class Case(NamedTuple):
    samples: tuple[str, ...] = ("a", "b")
    silent: tuple[str, ...] = ("a",)
    timeouts: int = 2
    has_statistics: bool = True


WORKING = {
    "it answers again": Case(silent=()),
    "no sample": Case(("b",), timeouts=5),
    "no sample at all": Case(()),
    "it never answered": Case(("never",), ("a", "never"), 5),
    "a decoupled model": Case(("decoupled",), ("a", "decoupled")),
    "one timeout": Case(timeouts=1),
    "no statistics": Case(("a",), timeouts=5, has_statistics=False),
}


async def test_a_model_that_may_work_is_ready() -> None:
    async def judged(case: Case) -> object:
        async with silent("a", timeouts=case.timeouts) as triton:
            triton.server.silent, triton.server.has_statistics = set(case.silent), case.has_statistics
            async with triton.watching(*case.samples, may_reload=True, restarts=True):
                await asyncio.sleep(0.5)
            return triton.hung, triton.health.is_stuck, triton.server.control, triton.restarts

    found = await asyncio.gather(*map(judged, WORKING.values()))
    assert dict(zip(WORKING, found, strict=True)) == dict.fromkeys(WORKING, ([], False, [], 0))


@asynccontextmanager
async def completing(
    server: ScriptedTriton, model: str, *, every_s: float = 0.05, taking_s: float
) -> AsyncIterator[None]:
    """The model completes requests of other callers, or abandoned ones."""

    async def complete() -> None:
        while True:
            await asyncio.sleep(every_s)
            server.completed_s.setdefault(model, []).append(taking_s)

    async with running(complete()):
        yield


class Busy(NamedTuple):
    """``executing`` completes requests meanwhile."""

    model: str
    executing: str
    every_s: float
    taking_s: float
    hangs: bool


BUSY = {
    "it executes others": Busy("a", "a", 0.05, 0.001, hangs=False),
    "it executes slow streams": Busy("decoupled", "decoupled", 0.05, 5.0, hangs=False),
    "it executes the canaries and sends nothing": Busy("decoupled", "decoupled", 0.01, 0.001, hangs=True),
    "its step executes others": Busy("a", "step", 0.05, 5.0, hangs=False),
    "its step executes the canaries": Busy("a", "step", 0.05, 0.001, hangs=True),
}


async def test_a_busy_model_does_not_hang() -> None:
    """A canary is completed by the first step of an ensemble, in no time."""

    async def is_repaired(case: Busy) -> bool:
        async with silent(case.model) as triton, AsyncExitStack() as stack:
            await triton.call(case.model, SHORT_S, 5, streamed=case.model == "decoupled")
            work = completing(triton.server, case.executing, every_s=case.every_s, taking_s=case.taking_s)
            await stack.enter_async_context(work)
            step = Step(case.executing, "", (), ())
            triton.health.configs[case.model] = ModelConfig(case.model, "ensemble", 0, (), (), steps=(step,))
            await stack.enter_async_context(triton.watching(case.model, "b", may_reload=True, restarts=True))
            if case.hangs:
                await until(lambda: bool(triton.server.control))
            else:
                await asyncio.sleep(1.0)
            return bool(triton.server.control or triton.restarts or triton.health.is_stuck)

    found = await asyncio.gather(*map(is_repaired, BUSY.values()))
    assert dict(zip(BUSY, found, strict=True)) == {name: case.hangs for name, case in BUSY.items()}


async def test_a_model_that_answers_other_calls_does_not_hang() -> None:
    """Its canaries time out, and the short deadlines of other calls pass."""
    async with silent("a", timeouts=5) as triton:

        async def calls() -> None:
            while True:
                other = InferenceRequest("a", (), is_probe=True)
                WatchedCall(other, "ModelInfer", 30.0, (), triton.health).response(RESPONSE)
                await triton.call("a", SHORT_S)

        async with running(calls()), triton.watching("a", "b", may_reload=True, restarts=True):
            await asyncio.sleep(1.0)
        assert (triton.hung, triton.health.is_stuck, triton.server.control, triton.restarts) == ([], False, [], 0)


async def test_an_answered_call_clears_the_suspicion() -> None:
    """The answers are of another model: Triton is not stuck."""
    async with silent("a", timeouts=2) as triton, triton.watching("a"):
        await asyncio.sleep(0.1)  # until the watch sends the canary
        for _ in range(60):
            await triton.call("b")
            await asyncio.sleep(0.02)
        assert not triton.health.is_stuck


WAITING = 200
CANARY_S = 0.1


class TestBusyEngines:
    """An LLM engine with 200 waiting requests is silent until its first outputs."""

    @pytest.fixture(autouse=True)
    def short_timeouts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health_module, "LEAST_TIMEOUT_S", CANARY_S)
        monkeypatch.setattr(watch_module, "HUNG_S", 60.0)

    @asynccontextmanager
    async def busy(self, first_output_s: float) -> AsyncIterator[Watched]:
        async with watched_triton(declared=ModelDeclaration(first_output_s)) as triton:
            triton.server.ready["decoupled"] = "READY"
            await self.call(triton, 30.0)
            triton.server.silent = {"decoupled"}
            tasks = [asyncio.create_task(self.call(triton, 30.0)) for _ in range(WAITING)]
            try:
                await until(lambda: triton.server.waiting >= WAITING)
                yield triton
            finally:
                triton.server.silent = set()
                await asyncio.gather(*tasks)

    async def call(self, triton: Watched, timeout_s: float = 2 * CANARY_S) -> None:
        await triton.call("decoupled", timeout_s, streamed=True)

    async def test_a_busy_engine_has_no_fault(self) -> None:
        """Callers and canaries time out behind 200 requests that are within their time until the first output."""
        async with self.busy(3600) as triton, triton.watching("decoupled", deadline_s=30.0):
            for _ in range(10):
                await self.call(triton)
            assert triton.health.calls_of("decoupled", "ModelStreamInfer").unanswered > FAILURES
            assert not triton.health.faults
            assert await triton.engine.model_ready("decoupled")
            triton.server.silent = set()
            await self.call(triton)
            assert not triton.health.faults

    @pytest.mark.parametrize("first_output_s", [4 * CANARY_S, 0])
    async def test_a_silent_engine_has_a_fault_after_its_first_output_time(self, first_output_s: float) -> None:
        began = time.monotonic()
        async with self.busy(first_output_s) as triton, triton.watching("decoupled", deadline_s=30.0):
            while not triton.health.faults:
                await self.call(triton)
            assert time.monotonic() - began >= first_output_s

    async def test_an_answer_to_an_older_request_closes_the_breaker(self) -> None:
        """The canary waits behind other requests."""
        async with self.busy(0) as triton:
            older = WatchedCall(InferenceRequest("decoupled", ()), "ModelStreamInfer", 30.0, (), triton.health)
            while not triton.health.with_fault(ModelFault.OPEN):
                await self.call(triton)
            older.response(InferenceResponse({}))
            assert not triton.health.with_fault(ModelFault.OPEN)
