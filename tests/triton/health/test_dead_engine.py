"""A dead engine in a model that Triton reports as ready: found, refused, repaired. With a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.engine import discard_stream
from app.core.errors import GatewayError, ModelError, ModelNotReady
from app.core.inference import Deadline, InferenceRequest
from app.core.model import ModelConfig, Step
from app.triton.connect import open_transport
from app.triton.engine import TritonEngine
from app.triton.health import repair as module
from app.triton.health.declarations import NoDeclarations
from app.triton.health.health import ENGINE_RETRY_S, TritonHealth
from app.triton.health.python_backend import REPEATED, Stubs
from app.triton.health.repair import StubRepair
from tests.toolkit.triton import FakeTriton, piece, serving
from tests.toolkit.watches import WITHIN_S, Samples, eventually, running

PATTERNS = ["EngineCore encountered an issue", "EngineDeadError", r"LLM is shutting down"]
MESSAGES = [
    "Error generating stream: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "vllm.v1.engine.exceptions.EngineDeadError",
    "Error generating request: LLM is shutting down",
]


class Server(FakeTriton):
    """The engine of every model is dead until the model is loaded ``loads_needed`` times."""

    def __init__(self) -> None:
        super().__init__(unary=self._unary, streamed=self._streamed, ready={"m": "READY"})
        self.loads_needed = 1
        self.message = MESSAGES[0]
        self.samples_work = False
        """Whether the engine works, and only callers get the message."""

    def is_dead(self, model: str) -> bool:
        return self.control.count(f"+{model}") < self.loads_needed

    async def _unary(self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        self.requests.append(request)
        if self.is_dead(request.model_name):
            await context.abort(grpc.StatusCode.INTERNAL, self.message)
        return pb.ModelInferResponse()

    async def _streamed(
        self, request: pb.ModelInferRequest, context: object
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        is_dead = self.is_dead(request.model_name) and not self.samples_work
        yield pb.ModelStreamInferResponse(error_message=self.message) if is_dead else piece(final=True)


class EngineErrors(NoDeclarations):
    def engine_errors(self, model: str) -> Iterable[str]:
        return PATTERNS


class Dying:
    def __init__(self, server: Server, engine: TritonEngine, health: TritonHealth, deaths: list[str]) -> None:
        self.server = server
        self.engine = engine
        self.health = health
        self.stubs = health.stubs
        self.deaths = deaths

    async def error(self, *, streamed: bool = False, model: str = "m") -> GatewayError | None:
        request, deadline = InferenceRequest(model, ()), Deadline.after(WITHIN_S)
        try:
            await (discard_stream if streamed else TritonEngine.infer)(self.engine, request, deadline)
        except GatewayError as exc:
            return exc
        return None

    @asynccontextmanager
    async def repairing(self, *samples: str, may_reload: bool) -> AsyncIterator[None]:
        repair = StubRepair(self.engine, self.stubs, Samples(*samples), may_reload=may_reload)
        async with running(repair.run()):
            yield


@asynccontextmanager
async def dying(declared: NoDeclarations) -> AsyncIterator[Dying]:
    deaths: list[str] = []
    async with serving(Server()) as server, open_transport(server.url) as channel:
        assert isinstance(server, Server)
        health = TritonHealth(Stubs(count_engine_death=deaths.append, declared=declared))
        engine = TritonEngine(channel, health=health)
        await engine.model_config("m")
        yield Dying(server, engine, health, deaths)


@pytest.fixture
async def llm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Dying]:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
    async with dying(EngineErrors()) as each:
        yield each


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_request_that_finds_it_may_be_repeated(llm: Dying, message: str, *, streamed: bool) -> None:
    llm.server.message = message
    error = await llm.error(streamed=streamed)
    assert isinstance(error, ModelNotReady)
    assert (error.retryable, error.retry_after_s, error.was_answered) == (True, ENGINE_RETRY_S, True)
    assert message not in error.detail


@pytest.mark.parametrize("streamed", [False, True])
async def test_another_message_stays_an_error_of_the_model(llm: Dying, *, streamed: bool) -> None:
    llm.server.message = "out of memory"
    assert type(await llm.error(streamed=streamed)) is ModelError
    assert not llm.stubs.suspects


async def test_without_engine_errors_nothing_changes() -> None:
    async with dying(NoDeclarations()) as llm:
        assert type(await llm.error()) is ModelError
        assert not llm.stubs.suspects


async def test_the_model_is_not_ready_and_not_called_until_it_is_loaded_again(llm: Dying) -> None:
    await llm.error()
    async with llm.repairing("m", may_reload=False):
        await eventually(lambda: llm.stubs.dead == ["m"])
        assert not await llm.engine.model_ready("m")
        assert llm.engine.fault("m") == "its engine has died"
        called = len(llm.server.requests)
        error = await llm.error()
        assert isinstance(error, ModelNotReady)
        assert (error.detail, error.retry_after_s) == ("The engine of model 'm' has died.", ENGINE_RETRY_S)
        assert len(llm.server.requests) == called
        llm.server.control.append("+m")  # somebody loads it
        await eventually(lambda: not llm.stubs.dead)
    assert await llm.engine.model_ready("m")
    assert (await llm.error(), llm.engine.fault("m"), llm.deaths) == (None, "", ["m"])


async def test_with_permission_it_is_loaded_again(llm: Dying, caplog: pytest.LogCaptureFixture) -> None:
    await llm.error()
    async with llm.repairing("m", may_reload=True):
        await eventually(lambda: llm.server.control == ["-m", "+m"] and not llm.stubs.dead)
    assert (llm.deaths, await llm.error()) == (["m"], None)
    assert "the engine of model 'm' died, although Triton reports the model as ready" in caplog.text


async def test_a_text_that_a_sample_disproves_is_no_death(llm: Dying) -> None:
    """A model may repeat the text of a caller in its error."""
    llm.server.samples_work = True
    for _ in range(10):
        await llm.error()
    async with llm.repairing("m", may_reload=True):
        await eventually(lambda: not llm.stubs.suspects)
    assert (llm.deaths, llm.server.control) == ([], [])


class TestWithoutASample:
    async def test_repeated_errors_confirm_it(self, llm: Dying) -> None:
        for errors in range(1, REPEATED + 1):
            async with llm.repairing(may_reload=False):
                await llm.error()
                await asyncio.sleep(0.05)
            assert bool(llm.deaths) == (errors == REPEATED)

    async def test_an_answer_in_between_disproves_it(self, llm: Dying) -> None:
        for _ in range(REPEATED):
            await llm.error()
            llm.server.loads_needed = 0
            assert await llm.error() is None
            llm.server.loads_needed = 1
        assert llm.stubs.suspects == []

    async def test_one_request_at_a_time_tries_the_engine_again(self, llm: Dying) -> None:
        async with llm.repairing(may_reload=False):
            for _ in range(REPEATED):
                await llm.error()
            await eventually(lambda: len(llm.deaths) == 1)
            for deaths in (2, 3):
                await eventually(lambda: not llm.stubs.dead)
                await llm.error()
                await eventually(lambda deaths=deaths: len(llm.deaths) == deaths)  # type: ignore[misc]
            llm.server.loads_needed = 0
            await eventually(lambda: not llm.stubs.dead)
            assert await llm.error() is None
            llm.server.loads_needed = 1
            await llm.error()
            await asyncio.sleep(0.1)
        assert len(llm.deaths) == 3


async def test_below_an_ensemble_every_model_is_loaded_again(llm: Dying) -> None:
    """The message about an engine names no model."""
    steps = tuple(Step(name, "", (), ()) for name in ("m", "other"))
    llm.stubs.learn(ModelConfig("chain", "ensemble", 0, (), (), steps=steps))
    llm.server.message = f"in ensemble 'chain', {MESSAGES[0]}"
    llm.server.loads_needed = 1
    with suppress(GatewayError):
        await llm.error(model="chain")
    async with llm.repairing("chain", may_reload=True):
        await eventually(lambda: len(llm.server.control) >= 4)
    assert llm.server.control[:4] == ["-m", "+m", "-other", "+other"]
