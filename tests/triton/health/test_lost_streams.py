"""Streams that Triton will never continue end with a retryable error, with a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import ModelNotReady, Unavailable, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest
from app.triton.health import health as health_module
from app.triton.health import health_watch as watch_module
from app.triton.health.health import ModelFault
from tests.toolkit.triton import FakeTriton, piece
from tests.toolkit.watches import WITHIN_S, Watched, eventually, watched_triton


class Server(FakeTriton):
    """Sends ``pieces`` responses and is silent then. Knows the statistics of one model."""

    def __init__(self) -> None:
        super().__init__(streamed=self._streamed, ready={"m": "READY"})
        self.pieces = 1
        self.count: int | None = 1
        """None: statistics without results, as of another server than Triton."""
        self.is_live = True
        self.goes_on = asyncio.Event()

    async def _streamed(
        self, request: pb.ModelInferRequest, context: object
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        for number in range(self.pieces):
            yield piece(number)
        await self.goes_on.wait()
        yield piece(final=True)

    async def ServerLive(self, request: object, context: object) -> pb.ServerLiveResponse:  # noqa: N802 - gRPC's name
        return pb.ServerLiveResponse(live=self.is_live)

    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: object
    ) -> pb.ModelStatisticsResponse:
        answer = pb.ModelStatisticsResponse()
        model = answer.model_stats.add(name=request.name)
        if self.count is not None:
            model.inference_stats.success.count = self.count
            model.inference_stats.fail.SetInParent()
        return answer


class Reading:
    """A stream of model ``m`` that a task reads."""

    def __init__(self, triton: Watched) -> None:
        assert isinstance(triton.server, Server)
        self.server = triton.server
        self.triton = triton
        self.health = triton.health
        self.outputs = 0
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _ in self.triton.engine.infer_stream(InferenceRequest("m", ()), Deadline.after(WITHIN_S)):
            self.outputs += 1

    async def begun(self) -> None:
        await eventually(lambda: self.outputs == self.server.pieces and bool(self.triton.engine.streams))

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def ended(self) -> None:
        await asyncio.wait({self._task})

    async def error(self) -> Unavailable:
        with pytest.raises(Unavailable) as caught:
            async with asyncio.timeout(WITHIN_S):
                await self._task
        return caught.value


@pytest.fixture(params=["asyncio", "grpcio"])
async def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reading]:
    monkeypatch.setattr(health_module, "SILENCE_S", 0.2)
    async with watched_triton(Server(), kind=request.param) as triton:
        await triton.engine.model_config("m")
        found = Reading(triton)
        yield found
        found.server.goes_on.set()
        await found.ended()


async def test_the_stream_of_a_dead_process_ends(reading: Reading) -> None:
    async with reading.triton.watching():
        await reading.begun()
        reading.health.begin(ModelFault.PROCESS, "m")
        error = await reading.error()
    assert isinstance(error, ModelNotReady)
    assert error.retryable
    assert not reading.triton.engine.streams
    assert not reading.health.with_fault(ModelFault.OPEN)
    assert not reading.health.calls_of("m", "ModelStreamInfer").unanswered


async def test_a_repair_begins_after_the_streams_of_the_dead_process_have_ended(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload beside them can abort Triton 2.51."""
    monkeypatch.setattr(watch_module, "FIRST_DELAY_S", WITHIN_S)
    async with reading.triton.watching(may_reload=True):
        await reading.begun()
        reading.health.begin(ModelFault.PROCESS, "m")
        await reading.error()
        assert reading.server.control == []
        await eventually(lambda: reading.server.control == ["-m", "+m"])


async def test_a_stream_that_began_after_the_death_goes_on(reading: Reading) -> None:
    await reading.begun()
    reading.health.begin(ModelFault.PROCESS, "m")
    reading.health.revive("m")
    later = Reading(reading.triton)
    await later.begun()
    async with reading.triton.watching():
        await reading.error()
        await asyncio.sleep(0.1)
        assert later.is_running
        reading.server.goes_on.set()
        await eventually(lambda: not later.is_running)
    assert later.outputs == 2


async def test_a_stream_of_a_model_that_was_reloaded_ends(reading: Reading) -> None:
    reading.server.count = 5
    async with reading.triton.watching():
        await reading.begun()
        await asyncio.sleep(0.1)
        assert reading.is_running
        reading.server.count = 1
        assert isinstance(await reading.error(), ModelNotReady)


async def test_a_silent_stream_ends_when_triton_does_not_answer(reading: Reading) -> None:
    async with reading.triton.watching():
        await reading.begun()
        reading.server.is_live = False
        assert isinstance(await reading.error(), UpstreamUnavailable)


async def test_the_watch_goes_on_after_statistics_that_it_cannot_read(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    reading.server.count = None
    async with reading.triton.watching():
        await reading.begun()
        await eventually(lambda: "a part of the watch of Triton failed" in caplog.text)
        reading.server.is_live = False
        assert isinstance(await reading.error(), UpstreamUnavailable)


async def test_a_silent_stream_of_a_working_triton_goes_on(reading: Reading) -> None:
    async with reading.triton.watching():
        await reading.begun()
        await asyncio.sleep(0.6)
        assert reading.is_running
        reading.server.goes_on.set()
        await eventually(lambda: not reading.is_running)


async def test_a_silent_stream_finds_a_dead_process(reading: Reading) -> None:
    """The sample meets the dead process: no other request is needed to find it."""
    await reading.begun()

    async def dead(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.")
        raise AssertionError

    reading.server.unary = dead
    async with reading.triton.watching("m"):
        await eventually(lambda: reading.health.with_fault(ModelFault.PROCESS) == ["m"])
