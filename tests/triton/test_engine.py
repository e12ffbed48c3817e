"""The engine with a real gRPC server."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import partial

import grpc
import numpy as np
import pytest
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from app.core.engine import ObservedCall
from app.core.errors import (
    DeadlineExceeded,
    GatewayError,
    ModelError,
    ModelNotReady,
    PayloadTooLarge,
    TooManyRequests,
    UpstreamError,
    UpstreamProtocol,
)
from app.core.inference import Deadline, InferenceRequest, InferenceResponse, Tensor, TraceContext
from app.core.model import ModelState
from app.triton.cancellation import QUIET_S
from app.triton.connect import MAX_MESSAGE_BYTES, Kind, open_transport
from app.triton.health.health import TritonHealth
from app.triton.triton_engine import TritonEngine, WatchedCall
from tests.toolkit.triton import FakeTriton, Streamed, answering, piece, serving
from tests.toolkit.waiting import until

REQUEST = InferenceRequest("m", (Tensor("X", "INT32", np.array([7], np.int32)),), parameters={"seed": 3})
TRACE = TraceContext("a" * 32, "b" * 16, 1, "a=1")
UNSAMPLED = structs.replace(TRACE, flags=0)
LONG_S = 20.0


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with serving(FakeTriton()) as server:
        yield server


class Calls(list[tuple[str, str]]):
    """Observes calls and records the model and the code of each ended call."""

    def __call__(self, request: InferenceRequest, method: str) -> ObservedCall:
        calls = self

        class Kept(ObservedCall):
            def ended(self, code: str, error: GatewayError | None) -> None:
                calls.append((request.model, code))

        return Kept(request, method)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture(params=["asyncio", "grpcio"])
async def engine(triton: FakeTriton, calls: Calls, request: pytest.FixtureRequest) -> AsyncIterator[TritonEngine]:
    async with open_transport(triton.url, kind=request.param) as transport:
        yield TritonEngine(transport, [calls])


async def everything(engine: TritonEngine, seconds: float = LONG_S) -> list[InferenceResponse]:
    async with aclosing(engine.infer_stream(REQUEST, Deadline.after(seconds))) as responses:
        return [response async for response in responses]


def numbers(responses: list[InferenceResponse]) -> list[list[int]]:
    return [tensor.array.tolist() for response in responses for tensor in response.outputs.values()]


async def echo(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
    answer = pb.ModelInferResponse(raw_output_contents=request.raw_input_contents)
    answer.outputs.add(name="Y", datatype="INT32", shape=[1])
    return answer


class Started:
    """Tests of an engine in front of a scripted Triton, with both gRPC clients."""

    @pytest.fixture(autouse=True)
    def _start(self, engine: TritonEngine, triton: FakeTriton, calls: Calls) -> None:
        self.engine, self.triton, self.calls = engine, triton, calls


class TestUnary(Started):
    async def test_a_request_and_its_answer(self) -> None:
        self.triton.unary = echo
        answer = await self.engine.infer(REQUEST, Deadline.after(LONG_S))
        assert numbers([answer]) == [[7]]
        assert answer.is_final
        assert self.triton.requests[0].id == REQUEST.request_id
        assert self.triton.requests[0].parameters["seed"].int64_param == 3
        assert self.calls == [("m", "OK")]

    @pytest.mark.parametrize(
        ("trace", "takes_parameter", "parameter", "metadata"),
        [
            (TRACE, True, TRACE.traceparent, {"traceparent": TRACE.traceparent, "tracestate": "a=1"}),
            (UNSAMPLED, True, UNSAMPLED.traceparent, {}),
            (TRACE, False, "", {"traceparent": TRACE.traceparent, "tracestate": "a=1"}),
            (None, True, "", {}),
        ],
        ids=["sampled", "not sampled", "the model does not read it", "no trace"],
    )
    async def test_how_a_trace_is_sent(
        self, *, trace: TraceContext | None, takes_parameter: bool, parameter: str, metadata: dict[str, str]
    ) -> None:
        self.triton.unary = echo
        request = structs.replace(REQUEST, trace=trace, takes_traceparent=takes_parameter)
        await self.engine.infer(request, Deadline.after(LONG_S))
        parameters = self.triton.requests[0].parameters
        assert (parameters["traceparent"].string_param if "traceparent" in parameters else "") == parameter
        assert self.triton.trace_metadata() == metadata

    async def test_a_status_is_converted_to_an_error(self) -> None:
        async def refuse(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
            return await context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")

        self.triton.unary = refuse
        with pytest.raises(TooManyRequests) as caught:
            await self.engine.infer(REQUEST, Deadline.after(LONG_S))
        assert caught.value.upstream == UpstreamError("UNAVAILABLE", "Exceeds maximum queue size")
        assert self.calls == [("m", "UNAVAILABLE")]

    async def test_a_missed_deadline_cancels_the_call(self) -> None:
        self.triton.unary = hang
        with pytest.raises(DeadlineExceeded):
            await self.engine.infer(REQUEST, Deadline.after(0.05))
        assert self.calls == [("m", "DEADLINE_EXCEEDED")]
        assert not self.triton.cancelled.is_set()
        await asyncio.wait_for(self.triton.cancelled.wait(), LONG_S)

    async def test_a_cancelled_task_cancels_the_call(self) -> None:
        self.triton.unary = hang
        work = asyncio.create_task(self.engine.infer(REQUEST, Deadline.after(LONG_S)))
        await until(lambda: bool(self.triton.requests))
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.wait_for(self.triton.cancelled.wait(), LONG_S)
        assert self.calls == [("m", "CANCELLED")]

    @pytest.mark.parametrize("kind", ["asyncio", "grpcio"])
    async def test_a_response_that_is_not_a_message_is_a_protocol_error(self, kind: Kind) -> None:
        async with answering(b"\xff\xff\xff") as url, open_transport(url, kind=kind) as transport:
            self.engine = TritonEngine(transport, [self.calls])
            with pytest.raises(UpstreamProtocol):
                await self.engine.infer(REQUEST, Deadline.after(LONG_S))
            with pytest.raises(UpstreamProtocol):
                await everything(self.engine)
            await self.engine.close()
        assert self.calls == [("m", "UNKNOWN")] * 2


class TestStream(Started):
    @pytest.mark.parametrize(
        ("ending", "outputs"),
        [
            ([piece(1), piece(2), piece(final=True)], [[1], [2]]),
            ([piece(1), piece(2, final=True)], [[1], [2]]),
            ([piece(final=True)], []),
        ],
        ids=["separate", "on the last output", "without outputs"],
    )
    async def test_the_final_flag_may_be_separate_or_on_the_last_output(
        self, ending: list[pb.ModelStreamInferResponse], outputs: list[list[int]]
    ) -> None:
        self.triton.streamed = scripted(ending)
        responses = await everything(self.engine)
        assert numbers(responses) == outputs
        assert [response.is_final for response in responses] == [False] * (len(ending) - 1) + [True]
        assert self.triton.requests[0].parameters["triton_enable_empty_final_response"].bool_param
        assert self.calls == [("m", "OK")]

    async def test_the_inputs_are_freed_after_they_are_sent(self) -> None:
        self.triton.streamed = scripted([piece(1), piece(final=True)])
        array = np.zeros(1000, np.int32)
        held = weakref.ref(array)
        request = InferenceRequest("m", (Tensor("X", "INT32", array),))
        async with aclosing(self.engine.infer_stream(request, Deadline.after(LONG_S))) as responses:
            del array, request
            assert numbers([await anext(responses)]) == [[1]]
            assert held() is None
        assert len(self.triton.requests[0].raw_input_contents[0]) == 4000

    async def test_an_error_inside_a_stream_has_no_code(self) -> None:
        self.triton.streamed = scripted([piece(1), pb.ModelStreamInferResponse(error_message="no boxes"), piece(2)])
        responses = self.engine.infer_stream(REQUEST, Deadline.after(LONG_S))
        assert numbers([await anext(responses)]) == [[1]]
        with pytest.raises(ModelError) as caught:
            await anext(responses)
        assert caught.value.upstream == UpstreamError(None, "no boxes")
        assert self.calls == [("m", "UNKNOWN")]

    async def test_a_stream_without_a_final_flag_is_a_protocol_error(self) -> None:
        self.triton.streamed = scripted([piece(1)])
        with pytest.raises(UpstreamProtocol, match="without marking its end"):
            await everything(self.engine)

    async def test_a_silent_stream_ends_at_the_deadline(self) -> None:
        self.triton.streamed = scripted([piece(1)], hangs_s=3600)
        with pytest.raises(DeadlineExceeded):
            await everything(self.engine, 0.1)
        assert self.calls == [("m", "DEADLINE_EXCEEDED")]

    @pytest.mark.parametrize("waits", [False, True], ids=["its generator is closed", "its reader is cancelled"])
    async def test_an_abandoned_stream_is_cancelled_later(self, *, waits: bool) -> None:
        self.triton.streamed = scripted([piece(1)], hangs_s=3600)
        responses = self.engine.infer_stream(REQUEST, Deadline.after(LONG_S))
        assert numbers([await anext(responses)]) == [[1]]
        if waits:
            waiting = asyncio.ensure_future(anext(responses))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled()
        else:
            await responses.aclose()
        assert self.calls == [("m", "CANCELLED")]
        assert not self.engine.streams
        assert not self.triton.cancelled.is_set()
        await asyncio.wait_for(self.engine.close(), LONG_S)
        await asyncio.wait_for(self.triton.cancelled.wait(), LONG_S)

    @pytest.mark.parametrize(
        ("pieces", "ends_after_s", "by_hook"),
        [
            ([piece(1), piece(2), piece(3)], QUIET_S / 2, False),
            ([piece(1, final=True)], QUIET_S * 3, False),
            ([pb.ModelStreamInferResponse(error_message="no boxes")], QUIET_S * 3, False),
            ([piece(1)], QUIET_S * 3, True),
        ],
        ids=["a burst", "after the final response", "after an error", "by a cancel call"],
    )
    async def test_a_stream_that_ends_soon_is_not_cancelled(
        self, pieces: list[pb.ModelStreamInferResponse], ends_after_s: float, by_hook: bool
    ) -> None:
        self.triton.streamed = scripted(pieces, hangs_s=ends_after_s)
        responses = self.engine.infer_stream(structs.replace(REQUEST, ends_by_hook=by_hook), Deadline.after(LONG_S))
        with suppress(ModelError):
            await anext(responses)
        await responses.aclose()
        await asyncio.wait_for(self.engine.close(), LONG_S)
        assert not self.triton.cancelled.is_set()

    async def test_a_stream_that_ignores_its_cancel_call_is_cancelled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.triton.triton_engine.SELF_END_S", 0.3)
        self.triton.streamed = scripted([piece(1)], hangs_s=3600)
        responses = self.engine.infer_stream(structs.replace(REQUEST, ends_by_hook=True), Deadline.after(LONG_S))
        await anext(responses)
        await responses.aclose()
        await asyncio.wait_for(self.triton.cancelled.wait(), LONG_S)


@pytest.mark.parametrize(("seconds", "error"), [(0.09, DeadlineExceeded), (LONG_S, ModelError)])
async def test_a_model_that_stops_at_the_deadline_is_not_a_failed_model(
    triton: FakeTriton, engine: TritonEngine, seconds: float, error: type[GatewayError]
) -> None:
    async def stopped(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        await context.abort(grpc.StatusCode.CANCELLED, "in ensemble 'm', cancelled")
        raise AssertionError

    triton.unary = stopped
    with pytest.raises(error):
        await engine.infer(REQUEST, Deadline.after(seconds))


class TestBeforeTheCall(Started):
    async def test_a_passed_deadline_sends_no_request(self) -> None:
        passed = Deadline(expires_at=0.0)
        with pytest.raises(DeadlineExceeded):
            await self.engine.infer(REQUEST, passed)
        with pytest.raises(DeadlineExceeded):
            await anext(self.engine.infer_stream(REQUEST, passed))
        assert self.triton.requests == []
        assert self.calls == []

    async def test_a_request_over_the_limit_of_grpc_is_not_sent(self) -> None:
        large = InferenceRequest("m", (Tensor("X", "UINT8", np.zeros(MAX_MESSAGE_BYTES, np.uint8)),))
        self.triton.unary, self.triton.streamed = echo, scripted([piece(final=True)])
        with pytest.raises(PayloadTooLarge, match="67108864 bytes"):
            await self.engine.infer(large, Deadline.after(LONG_S))
        with pytest.raises(PayloadTooLarge, match="67108864 bytes"):
            await anext(self.engine.infer_stream(large, Deadline.after(LONG_S)))
        assert self.triton.requests == []


class TestModels(Started):
    async def test_readiness_is_read_from_the_index(self) -> None:
        self.triton.ready = {"a": "READY", "b": "UNAVAILABLE"}
        assert await self.engine.is_live()
        assert await self.engine.models() == [ModelState("a", "1", ready=True), ModelState("b", "1", ready=False)]
        assert await self.engine.model_ready("a")
        assert not await self.engine.model_ready("b")

    async def test_the_configuration_of_a_model(self) -> None:
        self.triton.ready = {"a": "READY"}
        assert (await self.engine.model_config("a")).backend == "python"
        with pytest.raises(ModelNotReady, match="'nobody'"):
            await self.engine.model_config("nobody")


async def hang(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
    await asyncio.sleep(3600)
    raise AssertionError


def scripted(pieces: list[pb.ModelStreamInferResponse], *, hangs_s: float = 0.0) -> Streamed:
    async def stream(
        request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        for each in pieces:
            yield each
        await asyncio.sleep(hangs_s)

    return stream


def test_each_observer_gets_the_previous_observers_request() -> None:
    notices: list[str] = []

    class Renamed(ObservedCall):
        def response(self, response: InferenceResponse) -> None:
            notices.append(f"{self.request.model} response")

        def ended(self, code: str, error: GatewayError | None) -> None:
            notices.append(f"{self.request.model} {code}")

    def rename(model: str, request: InferenceRequest, method: str) -> ObservedCall:
        notices.append(f"{model} started {request.model}")
        return Renamed(structs.replace(request, model=model), method)

    observers = [partial(rename, "a"), partial(rename, "b")]
    with WatchedCall(InferenceRequest("m", ()), "ModelInfer", 30.0, observers, TritonHealth()) as call:
        call.response(InferenceResponse({}))
    assert call.request.model == "b"
    assert notices == ["a started m", "b started a", "a response", "b response", "a OK", "b OK"]
