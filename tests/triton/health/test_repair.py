"""A dead model process is confirmed, repaired and used again, with a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import ModelError
from app.core.inference import Deadline, InferenceRequest
from app.triton.connect import open_transport
from app.triton.engine import TritonEngine
from app.triton.health import repair as module
from app.triton.health.health import TritonHealth
from app.triton.health.python_backend import Stubs
from app.triton.health.repair import StubRepair
from tests.toolkit.triton import FakeTriton, piece, serving
from tests.toolkit.watches import WITHIN_S, Samples, eventually, running

DEAD = "Stub process 'm_0_0' is not healthy."


class Server(FakeTriton):
    """The process of model ``m`` is dead until the model is loaded ``loads_needed`` times."""

    def __init__(self) -> None:
        super().__init__(unary=self._unary, streamed=self._streamed, ready={"m": "READY"})
        self.loads_needed = 0
        self.message = DEAD
        """The error for callers; the answer to the sample depends on ``loads_needed``."""

    @property
    def is_dead(self) -> bool:
        return self.control.count("+m") < self.loads_needed

    async def _unary(self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        await context.abort(grpc.StatusCode.INTERNAL, self.message)
        raise AssertionError

    async def _streamed(
        self, request: pb.ModelInferRequest, context: object
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        yield pb.ModelStreamInferResponse(error_message=DEAD) if self.is_dead else piece(final=True)


class Repairing:
    def __init__(self, server: Server, engine: TritonEngine, health: TritonHealth, deaths: list[str]) -> None:
        self.server = server
        self.engine = engine
        self.stubs = health.stubs
        self.deaths = deaths

    async def fail(self, times: int = 1) -> None:
        for _ in range(times):
            with suppress(ModelError):
                await self.engine.infer(InferenceRequest("m", ()), Deadline.after(WITHIN_S))

    @asynccontextmanager
    async def running(self, *samples: str, may_reload: bool) -> AsyncIterator[None]:
        repair = StubRepair(self.engine, self.stubs, Samples(*samples), may_reload=may_reload)
        async with running(repair.run()):
            yield


@pytest.fixture
async def repairing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Repairing]:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
    deaths: list[str] = []
    async with serving(Server()) as server, open_transport(server.url) as channel:
        assert isinstance(server, Server)
        health = TritonHealth(Stubs(deaths.append))
        engine = TritonEngine(channel, health=health)
        await engine.model_config("m")
        yield Repairing(server, engine, health, deaths)


async def test_a_dead_process_is_confirmed_by_the_sample_and_repaired(repairing: Repairing) -> None:
    repairing.server.loads_needed = 1
    await repairing.fail()
    async with repairing.running("m", may_reload=True):
        await eventually(lambda: repairing.server.control == ["-m", "+m"] and not repairing.stubs.dead)
    assert repairing.deaths == ["m"]
    assert await repairing.engine.model_ready("m")


async def test_an_unconfirmed_text_does_not_count_as_a_death(repairing: Repairing) -> None:
    """A model may repeat the text of a caller in its error."""
    await repairing.fail(50)
    async with repairing.running("m", may_reload=True):
        await eventually(lambda: not repairing.stubs.suspects)
    assert (repairing.deaths, repairing.server.control) == ([], [])


@pytest.mark.parametrize(("errors", "deaths"), [(2, []), (3, ["m"])])
async def test_without_a_sample_repeated_errors_confirm_it(
    repairing: Repairing, errors: int, deaths: list[str]
) -> None:
    await repairing.fail(errors)
    async with repairing.running(may_reload=True):
        await asyncio.sleep(0.1)
    assert repairing.deaths == deaths
    assert repairing.server.control == ["-m", "+m"] * len(deaths)


async def test_without_repair_the_model_is_not_ready_until_a_reload(repairing: Repairing) -> None:
    repairing.server.loads_needed = 1
    await repairing.fail()
    async with repairing.running("m", may_reload=False):
        await eventually(lambda: repairing.stubs.dead == ["m"])
        assert not await repairing.engine.model_ready("m")
        assert repairing.server.control == []
        await repairing.engine.reload_model("m")
        await eventually(lambda: not repairing.stubs.dead)
    assert repairing.deaths == ["m"]


async def test_loading_a_dead_model_is_retried_with_backoff(repairing: Repairing) -> None:
    repairing.server.loads_needed = 3
    await repairing.fail()
    async with repairing.running("m", may_reload=True):
        await eventually(lambda: bool(repairing.stubs.dead))
        await eventually(lambda: not repairing.stubs.dead)
    assert repairing.server.control == ["-m", "+m"] * 3
    assert repairing.deaths == ["m"]


async def test_a_triton_without_model_control_is_reported_once(
    repairing: Repairing, caplog: pytest.LogCaptureFixture
) -> None:
    repairing.server.loads_needed = 1
    repairing.server.refuses_control = True
    await repairing.fail()
    async with repairing.running("m", may_reload=True):
        await eventually(lambda: "--model-control-mode=explicit" in caplog.text)
        await asyncio.sleep(0.2)
        assert repairing.stubs.dead == ["m"]
        repairing.server.loads_needed = 0
        await eventually(lambda: not repairing.stubs.dead)
    assert caplog.text.count("--model-control-mode=explicit") == 1
