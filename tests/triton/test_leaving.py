"""Messages of a call that are read ahead, against a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from app.triton.channel import open_channel
from app.triton.leaving import Messages, hang_up
from tests.fakes.triton import FakeTriton, piece, serving

FLOOD = 100


def large(number: int) -> pb.ModelStreamInferResponse:
    """More than is read ahead."""
    answer = piece(number)
    answer.infer_response.raw_output_contents.append(bytes(20_000))
    return answer


async def _flood(request: pb.ModelInferRequest, context: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
    for number in range(FLOOD):
        yield large(number)


@pytest.fixture
async def call() -> AsyncIterator[grpc.aio.StreamStreamCall]:
    async with serving(FakeTriton(streamed=_flood)) as triton, open_channel(triton.url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(pb.ModelInferRequest(model_name="m"))
        await call.done_writing()
        yield call


def number_of(message: pb.ModelStreamInferResponse) -> int:
    return int.from_bytes(message.infer_response.raw_output_contents[0], "little")


def readers() -> list[asyncio.Task[None]]:
    """Not the tasks of the server, which runs in the same loop."""
    return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == Messages._read.__qualname__]


async def test_they_come_in_order_to_the_end(call: grpc.aio.StreamStreamCall) -> None:
    assert [number_of(message) async for message in Messages(call)] == list(range(FLOOD))


async def test_who_waits_may_be_cancelled_and_nothing_is_lost(call: grpc.aio.StreamStreamCall) -> None:
    messages, seen = Messages(call), []
    for _ in range(FLOOD):
        given_up = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        if not given_up.cancel():
            seen.append(number_of(given_up.result()))
    seen += [number_of(message) async for message in messages]
    assert seen == list(range(FLOOD))


async def test_closed_with_messages_waiting_they_are_let_go(call: grpc.aio.StreamStreamCall) -> None:
    messages = Messages(call)
    assert number_of(await anext(messages)) == 0
    await asyncio.sleep(0.1)
    (reading,) = readers()
    assert not reading.done()
    call.cancel()
    messages.close()
    await asyncio.wait([reading], timeout=5)
    assert reading.done()


async def test_hung_up_they_leave_no_task(call: grpc.aio.StreamStreamCall) -> None:
    messages = Messages(call)
    await anext(messages)
    left = readers()
    await hang_up(call, messages, due=0.0)
    assert call.done()
    await asyncio.wait(left, timeout=5)
    assert all(task.done() for task in left)
