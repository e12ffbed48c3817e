"""Prefetched messages and abandoned calls, against a real gRPC server."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from app.triton.abandoned import Messages, cancel_abandoned
from app.triton.channel import open_channel
from tests.fakes.triton import FakeTriton, answering, piece, serving

FLOOD = 100


def large(number: int) -> pb.ModelStreamInferResponse:
    """Larger than the prefetch limit."""
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


async def test_messages_arrive_in_order(call: grpc.aio.StreamStreamCall) -> None:
    assert [number_of(message) async for message in Messages(call)] == list(range(FLOOD))


async def test_cancelling_a_wait_loses_no_message(call: grpc.aio.StreamStreamCall) -> None:
    messages, seen = Messages(call), []
    for _ in range(FLOOD):
        given_up = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        if not given_up.cancel():
            seen.append(number_of(given_up.result()))
    seen += [number_of(message) async for message in messages]
    assert seen == list(range(FLOOD))


async def test_closing_drops_the_prefetched_messages(call: grpc.aio.StreamStreamCall) -> None:
    messages = Messages(call)
    assert number_of(await anext(messages)) == 0
    await asyncio.sleep(0.1)
    (reading,) = readers()
    assert not reading.done()
    call.cancel()
    messages.close()
    await asyncio.wait([reading], timeout=5)
    assert reading.done()


async def test_a_cancelled_call_leaves_no_task(call: grpc.aio.StreamStreamCall) -> None:
    messages = Messages(call)
    await anext(messages)
    left = readers()
    await cancel_abandoned(call, messages, due=0.0)
    assert call.done()
    await asyncio.wait(left, timeout=5)
    assert all(task.done() for task in left)


async def test_an_unreadable_message_ends_an_abandoned_call() -> None:
    """gRPC hands over None for a message that it cannot parse."""
    async with unreadable_stream() as call:
        messages = Messages(call)
        await cancel_abandoned(call, messages, due=0.0)
        assert call.done()


async def test_an_unreadable_message_is_a_decode_error() -> None:
    async with unreadable_stream() as call:
        with pytest.raises(DecodeError):
            await anext(Messages(call))


async def test_a_closed_channel_ends_an_abandoned_call() -> None:
    async with serving(FakeTriton(streamed=_silent)) as triton:
        channel = open_channel(triton.url)
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(pb.ModelInferRequest(model_name="m"))
        messages = Messages(call)
        cancelling = asyncio.create_task(cancel_abandoned(call, messages, due=time.monotonic() + 60))
        await asyncio.sleep(0.05)
        await channel.close()
        await asyncio.wait_for(cancelling, 5)


async def _silent(request: pb.ModelInferRequest, context: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
    await asyncio.sleep(3600)
    yield piece(1)


@asynccontextmanager
async def unreadable_stream() -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A call whose server answers bytes that are not a message."""
    async with answering(b"\xff\xff\xff") as url, open_channel(url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(pb.ModelInferRequest(model_name="m"))
        await call.done_writing()
        yield call


async def test_backlog_says_nothing_about_the_pace_of_the_model(call: grpc.aio.StreamStreamCall) -> None:
    """A reader that paused is behind until it had to wait for a message."""
    messages = Messages(call)
    await anext(messages)
    await asyncio.sleep(0.05)
    await anext(messages)
    await asyncio.sleep(0.001)
    assert messages.is_behind
    messages.close()
    call.cancel()
