"""A single Triton: repeats of calls and the breaker, with a real gRPC server."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import GatewayError, UpstreamUnavailable
from app.core.inference import Deadline, InferenceRequest
from app.grpc import frames
from app.grpc.frames import REFUSED_STREAM, frame_bytes
from app.grpc.rpc import Transport
from app.triton.connect import Kind, open_transport
from app.triton.health import health as health_module
from app.triton.health.health import FAILURES, ModelFault, TritonHealth
from app.triton.health.health_watch import HealthWatch
from app.triton.triton_engine import TritonEngine
from tests.grpc import test_client as h2
from tests.toolkit.triton import FakeTriton, piece, serving
from tests.toolkit.watches import Samples, eventually, running

GOOD = grpc.StatusCode.OK


class Scripted(FakeTriton):
    """Ends each call with the next of ``codes``. The last code is used for all further calls."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        super().__init__(unary=self._unary, ready={"m": "READY"})
        self.codes = list(codes)
        self.is_silent = False
        self.text = "scripted"
        self.repeats = 0

    def count_repeat(self) -> None:
        self.repeats += 1

    async def _unary(self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        while self.is_silent:
            await asyncio.sleep(0.01)
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        if code is not GOOD:
            await context.abort(code, self.text)
        return pb.ModelInferResponse()


@asynccontextmanager
async def calling(
    triton: Scripted, kind: Kind = "asyncio"
) -> AsyncIterator[tuple[TritonEngine, TritonHealth, dict[str, int]]]:
    opened: dict[str, int] = {}
    health = TritonHealth(changed=lambda _, model, change: opened.update({model: opened.get(model, 0) + change}))
    async with serving(triton) as server, open_transport(server.url, kind=kind) as transport:
        yield repeating(transport, health, triton.count_repeat), health, opened


def repeating(
    transport: Transport, health: TritonHealth | None = None, on_repeat: Callable[[], None] = lambda: None
) -> TritonEngine:
    engine = TritonEngine(transport, health=health)
    engine.on_repeat = on_repeat
    return engine


async def ask(engine: TritonEngine, *, idempotent: bool = False, timeout_s: float = 5.0, probe: bool = False) -> str:
    """Returns the name of the error, or ``ok``."""
    request = InferenceRequest("m", (), idempotent=idempotent, is_probe=probe)
    try:
        await engine.infer(request, Deadline.after(timeout_s))
    except GatewayError as exc:
        return type(exc).__name__
    return "ok"


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
    triton = Scripted(grpc.StatusCode.UNAVAILABLE, GOOD)
    triton.text = text
    async with calling(triton, kind) as (engine, _, _):
        assert await ask(engine, idempotent=idempotent) == ("ok" if sent == 2 else "UpstreamUnavailable")
        assert (len(triton.requests), triton.repeats) == (sent, sent - 1)


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


class TestRepeatedStreams:
    @pytest.mark.parametrize("talk", [_refusing, _going_away])
    async def test_a_refused_stream_is_repeated(self, talk: h2.Talk) -> None:
        repeats: list[int] = []
        async with h2.server(talk, ANSWERING) as url, open_transport(url) as transport:
            engine = repeating(transport, on_repeat=lambda: repeats.append(1))
            request = InferenceRequest("m", ())
            responses = [each async for each in engine.infer_stream(request, Deadline.after(5))]
        assert [each.outputs["Y"].array.tolist() for each in responses] == [[7]]
        assert repeats == [1]

    @pytest.mark.parametrize(
        "talks", [(_going_away,), (_lost, ANSWERING)], ids=["it was repeated once", "Triton may have processed it"]
    )
    async def test_a_stream_is_not_repeated(self, talks: tuple[h2.Talk, ...]) -> None:
        async with h2.server(*talks) as url, open_transport(url) as transport:
            with pytest.raises(UpstreamUnavailable):
                await anext(repeating(transport).infer_stream(InferenceRequest("m", ()), Deadline.after(5)))


class TestBreaker:
    async def test_the_breaker_opens_after_consecutive_failures(self) -> None:
        triton = Scripted(grpc.StatusCode.UNAVAILABLE)
        async with calling(triton, "grpcio") as (engine, _, opened):
            assert [await ask(engine) for _ in range(FAILURES)] == ["UpstreamUnavailable"] * FAILURES
            assert opened == {"m": 1}
            with pytest.raises(UpstreamUnavailable, match="several times in a row") as caught:
                await engine.infer(InferenceRequest("m", ()), Deadline.after(5))
            assert caught.value.retry_after_s == 1
            assert not caught.value.was_sent
            assert triton.repeats == 0

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
        triton = Scripted(code)
        triton.text = text
        async with calling(triton) as (engine, health, _):
            for _ in range(2 * FAILURES):
                await ask(engine)
            assert not health.faults

    async def test_a_success_between_failures_keeps_the_breaker_closed(self) -> None:
        bad = grpc.StatusCode.UNAVAILABLE
        codes = [*[bad] * (FAILURES - 1), GOOD, *[bad] * (FAILURES - 1), GOOD]
        async with calling(Scripted(*codes), "grpcio") as (engine, health, _):
            for _ in codes:
                await ask(engine)
            assert not health.faults

    async def test_short_deadlines_do_not_open_the_breaker(self) -> None:
        triton = Scripted(GOOD)
        async with calling(triton) as (engine, health, _):
            await ask(engine)
            triton.is_silent = True
            assert [await ask(engine, timeout_s=0.05) for _ in range(2 * FAILURES)] == ["DeadlineExceeded"] * 10
            assert not health.faults
            triton.is_silent = False

    async def test_missed_deadlines_of_a_fast_model_open_the_breaker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health_module, "LEAST_TIMEOUT_S", 0.04)
        triton = Scripted(GOOD)
        async with calling(triton) as (engine, health, _):
            health.calls_of("m", "ModelInfer").answered(0.001, time.monotonic())
            triton.is_silent = True
            await asyncio.gather(*(ask(engine, timeout_s=0.05) for _ in range(FAILURES)))
            assert await ask(engine) == "UpstreamUnavailable"
            triton.is_silent = False

    async def test_a_successful_probe_closes_the_breaker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health_module, "FIRST_PROBE_S", 0.02)
        monkeypatch.setattr(health_module, "LEAST_TIMEOUT_S", 0.04)
        triton = Scripted(GOOD)
        async with calling(triton) as (engine, health, opened):
            health.calls_of("m", "ModelInfer").answered(0.001, time.monotonic())
            triton.is_silent = True
            await asyncio.gather(*(ask(engine, timeout_s=0.05) for _ in range(FAILURES)))
            before = len(triton.requests)
            async with running(HealthWatch(engine, health, Samples("m")).run()):
                await eventually(lambda: len(triton.requests) > before + 1)
                assert await ask(engine) == "UpstreamUnavailable"
                triton.is_silent = False
                await eventually(lambda: not health.faults)
            assert (await ask(engine), opened) == ("ok", {"m": 0})

    @pytest.mark.parametrize("samples", [(), ("m",)], ids=["without a sample", "with a sample"])
    async def test_an_unreachable_triton_is_probed_for_readiness(
        self, monkeypatch: pytest.MonkeyPatch, samples: tuple[str, ...]
    ) -> None:
        monkeypatch.setattr(health_module, "FIRST_PROBE_S", 0.02)
        triton = Scripted(grpc.StatusCode.UNAVAILABLE)
        async with calling(triton, "grpcio") as (engine, health, _):
            triton.ready["m"] = "UNAVAILABLE"
            for _ in range(FAILURES):
                await ask(engine)
            async with running(HealthWatch(engine, health, Samples(*samples)).run()):
                await asyncio.sleep(0.1)
                assert health.with_fault(ModelFault.OPEN) == ["m"]
                triton.ready["m"] = "READY"
                await eventually(lambda: not health.faults)
            assert len(triton.requests) == FAILURES
