"""Abandoned streams, over both transports with a real gRPC server."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tritonclient.grpc import service_pb2 as pb

from app.triton.cancellation import cancel_abandoned
from app.triton.grpcio import GrpcioStreamCall
from app.triton.transport import Kind, StreamCall, Transport, path_of
from app.triton.transports import open_transport
from tests.fakes.triton import FakeTriton, piece, serving

FLOOD = 100


def large(number: int) -> pb.ModelStreamInferResponse:
    """Returns a response larger than the prefetch limit."""
    answer = piece(number)
    answer.infer_response.raw_output_contents.append(bytes(20_000))
    return answer


async def _flood(request: pb.ModelInferRequest, context: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
    for number in range(FLOOD):
        yield large(number)


async def _silent(request: pb.ModelInferRequest, context: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
    await asyncio.sleep(3600)
    yield piece(1)


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with serving(FakeTriton(streamed=_flood)) as server:
        yield server


@pytest.fixture(params=["asyncio", "grpcio"])
async def transport(request: pytest.FixtureRequest, triton: FakeTriton) -> AsyncIterator[Transport]:
    kind: Kind = request.param
    async with open_transport(triton.url, kind=kind) as opened:
        yield opened


async def started(transport: Transport) -> StreamCall:
    message = pb.ModelInferRequest(model_name="m").SerializeToString()
    return await transport.stream(path_of("ModelStreamInfer"), message, 60.0)


def number_of(answer: bytes) -> int:
    message = pb.ModelStreamInferResponse.FromString(answer)
    return int.from_bytes(message.infer_response.raw_output_contents[0], "little")


async def test_cancelling_a_wait_loses_no_message(transport: Transport) -> None:
    call, seen = await started(transport), []
    for _ in range(FLOOD):
        abandoned = asyncio.ensure_future(anext(call))
        await asyncio.sleep(0)
        if not abandoned.cancel():
            seen.append(number_of(abandoned.result()))
    seen += [number_of(message) async for message in call]
    assert seen == list(range(FLOOD))


async def _flood_then_one(request: pb.ModelInferRequest, context: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
    async for answer in _flood(request, context):
        yield answer
    await asyncio.sleep(0.3)
    yield piece(FLOOD)


async def test_a_stalled_reader_is_behind_until_it_waits_again(transport: Transport, triton: FakeTriton) -> None:
    triton.streamed = _flood_then_one
    call = await started(transport)
    await anext(call)
    assert not call.is_behind
    await asyncio.sleep(0.2)
    await anext(call)
    await asyncio.sleep(0)
    assert call.is_behind
    numbers = [number_of(message) async for message in call]
    assert numbers[-1] == FLOOD
    assert not call.is_behind


async def _small(request: pb.ModelInferRequest, context: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
    for number in range(10):
        yield piece(number)


async def test_a_reader_within_the_prefetch_limit_is_not_behind(transport: Transport, triton: FakeTriton) -> None:
    triton.streamed = _small
    call = await started(transport)
    async for _ in call:
        assert not call.is_behind
        await asyncio.sleep(0.02)


class LateCall:
    """A call whose next message takes longer than the previous messages."""

    def __init__(self, *, is_behind: bool = False, is_receiving: bool = False) -> None:
        self.arrived: float | None = time.monotonic()
        self.gap_s: float | None = 0.02
        self.is_behind = is_behind
        self.is_receiving = is_receiving
        self.has_message = True
        self._due = time.monotonic() + 0.3

    def __aiter__(self) -> "LateCall":
        return self

    async def __anext__(self) -> bytes:
        if not self.has_message:
            raise StopAsyncIteration
        await asyncio.sleep(self._due - time.monotonic())
        self.has_message = False
        return b""

    def done(self) -> bool:
        return False

    def cancel(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("is_behind", [True, False])
async def test_cancelling_a_slow_reader_ignores_the_previous_pace(is_behind: bool) -> None:
    """The pace of buffered messages does not predict the next response of the model."""
    call = LateCall(is_behind=is_behind)
    await cancel_abandoned(call, due=0.0)
    assert call.has_message is not is_behind


async def test_a_call_is_not_cancelled_in_the_middle_of_a_response() -> None:
    call = LateCall(is_receiving=True)
    await cancel_abandoned(call, due=0.0)
    assert not call.has_message


async def _half(request: pb.ModelInferRequest, context: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
    """A large response, and later a small one."""
    yield large(1)
    await asyncio.sleep(1.3)
    yield piece(2)


async def test_after_a_large_response_the_next_may_have_begun(transport: Transport, triton: FakeTriton) -> None:
    """The gateway's own client sees the beginning of a response; grpcio shows only whole responses."""
    triton.streamed = _half
    call = await started(transport)
    await anext(call)
    assert call.is_receiving == isinstance(call, GrpcioStreamCall)
    await asyncio.sleep(1.1)
    assert not call.is_receiving
    await anext(call)


async def test_a_cancelled_call_leaves_no_task(transport: Transport) -> None:
    before = asyncio.all_tasks()
    call = await started(transport)
    await anext(call)
    await cancel_abandoned(call, due=0.0)
    assert call.done()
    for _ in range(500):
        if not {task for task in asyncio.all_tasks() - before if "grpcio" in str(task.get_coro())}:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("a task is left")


async def test_a_closed_transport_ends_an_abandoned_call(transport: Transport, triton: FakeTriton) -> None:
    triton.streamed = _silent
    call = await started(transport)
    cancelling = asyncio.create_task(cancel_abandoned(call, due=time.monotonic() + 60))
    await asyncio.sleep(0.05)
    await transport.close()
    await asyncio.wait_for(cancelling, 5)
