"""A single Triton: repeats of calls and the breaker, with a real gRPC server."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import DeadlineExceeded, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest
from app.grpc import frames
from app.grpc.frames import REFUSED_STREAM, frame_bytes
from app.triton.connect import Kind, open_transport
from app.triton.health import health as health_module
from app.triton.health.health import FAILURES, ModelFault
from app.triton.triton_engine import TritonEngine
from tests.grpc import test_client as h2
from tests.toolkit.triton import FakeTriton, piece
from tests.toolkit.waiting import until
from tests.toolkit.watches import Watched, watched_triton

GOOD = grpc.StatusCode.OK


class Failing(FakeTriton):
    """Ends each call of model ``m`` with the next of ``codes``. The last code is used for all further calls."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        super().__init__(unary=self._unary, ready={"m": "READY"})
        self.codes = list(codes)
        self.is_silent = False
        self.text = "scripted"
        self.repeats: list[str] = []
        """The model of each repeated call."""

    async def _unary(self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        while self.is_silent:
            await asyncio.sleep(0.01)
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        if code is not GOOD:
            await context.abort(code, self.text)
        return pb.ModelInferResponse()


OPENED, CLOSED = (ModelFault.OPEN, "m", 1), (ModelFault.OPEN, "m", -1)


@asynccontextmanager
async def calling(server: Failing, kind: Kind = "asyncio") -> AsyncIterator[Watched]:
    async with watched_triton(server, kind=kind) as triton:
        triton.engine.on_repeat = lambda: server.repeats.append("m")
        yield triton
        server.is_silent = False


STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


@pytest.mark.parametrize(
    ("text", "kind", "idempotent", "sent"),
    [
        ("scripted", "grpcio", True, 2),
        ("scripted", "grpcio", False, 1),
        ("scripted", "asyncio", True, 1),
        (STOPPING, "asyncio", False, 2),
        ("Request timeout expired", "grpcio", True, 1),
    ],
    ids=["may be lost, idempotent", "may be lost", "an answer", "not processed", "it waited too long"],
)
async def test_which_unavailable_requests_are_repeated(text: str, kind: Kind, idempotent: bool, sent: int) -> None:
    """In grpcio, a status of the server and a lost connection look the same."""
    server, request = Failing(grpc.StatusCode.UNAVAILABLE, GOOD), InferenceRequest("m", (), idempotent=idempotent)
    server.text = text
    async with calling(server, kind) as triton:
        with nullcontext() if sent == 2 else pytest.raises(UpstreamUnavailable):
            await triton.engine.infer(request, Deadline.after(5))
        assert (len(server.requests), len(server.repeats)) == (sent, sent - 1)


async def _refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuses the first stream (REFUSED_STREAM), and answers the second one on the same connection."""
    await h2.request(reader)
    writer.write(h2.SETTINGS + frame_bytes(frames.RST_STREAM, 0, 1, struct.pack(">I", REFUSED_STREAM)))
    await reader.readuntil(struct.pack(">I", 3))
    writer.write(h2.answer(3, piece(7, final=True).SerializeToString()))
    await reader.read()


async def _going_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Excludes the first stream (GOAWAY)."""
    await h2.request(reader)
    writer.write(h2.SETTINGS + frame_bytes(frames.GOAWAY, 0, 0, struct.pack(">II", 0, 0)))
    await reader.read()


async def _lost(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await h2.request(reader)


ANSWERING = h2.replying(h2.answer(1, piece(7, final=True).SerializeToString()))


@pytest.mark.parametrize(
    ("talks", "repeats"),
    [((_refusing, ANSWERING), 1), ((_going_away, ANSWERING), 1), ((_going_away,), 1), ((_lost, ANSWERING), 0)],
    ids=["refused", "excluded", "it was repeated once", "Triton may have processed it"],
)
async def test_which_streams_are_repeated(talks: tuple[h2.Talk, ...], repeats: int) -> None:
    repeated: list[str] = []
    is_answered = repeats > 0 and len(talks) > 1
    async with h2.server(*talks) as url, open_transport(url) as transport:
        engine = TritonEngine(transport)
        engine.on_repeat = lambda: repeated.append("m")
        responses = engine.infer_stream(InferenceRequest("m", ()), Deadline.after(5))
        with nullcontext() if is_answered else pytest.raises(UpstreamUnavailable):
            assert [each.outputs["Y"].array.tolist() async for each in responses] == [[7]]
    assert len(repeated) == repeats


class TestBreaker:
    async def test_the_breaker_opens_after_consecutive_failures(self) -> None:
        failures = [grpc.StatusCode.UNAVAILABLE] * (FAILURES - 1)
        async with calling(Failing(*failures, GOOD, *failures, GOOD, *failures), "grpcio") as triton:
            await triton.call("m", times=3 * FAILURES - 1)
            assert not triton.changes
            assert isinstance(await triton.call("m"), UpstreamUnavailable)
            assert triton.changes == [OPENED]
            error = await triton.call("m")
            assert isinstance(error, UpstreamUnavailable)
            assert "several times in a row" in error.detail
            assert (error.retry_after_s, error.was_sent, triton.server.repeats) == (1, False, [])

    @pytest.mark.parametrize(
        ("code", "text"),
        [
            (grpc.StatusCode.UNAVAILABLE, "a message of the model"),
            (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"),
            (grpc.StatusCode.INVALID_ARGUMENT, "an error of the caller"),
            (grpc.StatusCode.INTERNAL, "the model failed"),
            (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' has no available versions"),
        ],
    )
    async def test_an_answer_of_triton_does_not_open_the_breaker(self, code: grpc.StatusCode, text: str) -> None:
        server = Failing(code)
        server.text = text
        async with calling(server) as triton:
            await triton.call("m", times=2 * FAILURES)
            assert not triton.health.faults

    async def test_missed_deadlines_open_the_breaker_until_a_probe_succeeds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_module, "FIRST_PROBE_S", 0.02)
        async with calling(Failing(GOOD)) as triton:
            triton.health.models["m"].recent_s = 0.001
            triton.server.is_silent = True
            for _ in range(2 * FAILURES):
                assert isinstance(await triton.call("m", 0.05), DeadlineExceeded)
            assert not triton.health.faults, "these deadlines are shorter than the timeout of the model"
            monkeypatch.setattr(health_module, "LEAST_TIMEOUT_S", 0.04)
            await asyncio.gather(*(triton.call("m", 0.05) for _ in range(FAILURES)))
            assert isinstance(await triton.call("m", 0.05), UpstreamUnavailable)
            before = len(triton.server.requests)
            async with triton.watching("m"):
                await until(lambda: len(triton.server.requests) > before + 1)
                assert isinstance(await triton.call("m"), UpstreamUnavailable)
                triton.server.is_silent = False
                await until(lambda: not triton.health.faults)
            assert (await triton.call("m"), triton.changes) == (None, [OPENED, CLOSED])

    @pytest.mark.parametrize("samples", [(), ("m",)], ids=["without a sample", "with a sample"])
    async def test_an_unreachable_triton_is_probed_for_readiness(
        self, monkeypatch: pytest.MonkeyPatch, samples: tuple[str, ...]
    ) -> None:
        monkeypatch.setattr(health_module, "FIRST_PROBE_S", 0.02)
        async with calling(Failing(grpc.StatusCode.UNAVAILABLE), "grpcio") as triton:
            triton.server.ready["m"] = "UNAVAILABLE"
            await triton.call("m", times=FAILURES)
            async with triton.watching(*samples):
                await asyncio.sleep(0.1)
                assert triton.changes == [OPENED]
                triton.server.ready["m"] = "READY"
                await until(lambda: not triton.health.faults)
            assert len(triton.server.requests) == FAILURES
