"""Abandoned streams, over both transports with a real gRPC server."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from math import inf

import pytest
from tritonclient.grpc import service_pb2 as pb

from app.grpc.rpc import RpcError, StreamCall, Transport
from app.triton.cancellation import LONGEST_SETTLE_S, SETTLE_S, PacedCancels
from app.triton.connect import Kind, open_transport, path_of
from app.triton.grpcio import GrpcioStreamCall
from tests.toolkit.simulated_clock import simulated, stall
from tests.toolkit.triton import FakeTriton, piece, serving

FLOOD = 100


async def abandon(call: StreamCall, self_end_s: float = 0.0) -> None:
    """Abandons a stream that starts now."""
    await PacedCancels().end_stream(call, "m", time.monotonic(), 0.0, self_end_s)


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


@dataclass
class ScriptedCall:
    """Messages that arrive after the given gaps, in seconds of the simulated clock."""

    gaps: Sequence[float]
    deadline_s: float = inf
    """The caller's deadline passes after this time."""
    stall_s: float = 0.0
    """The event loop stalls for this time when the gateway begins to wait for a message."""
    arrived: float | None = None
    gap_s: float | None = None
    is_behind: bool = False
    is_receiving: bool = False
    count: int = 0
    """Number of messages read."""
    cancelled_after_s: float | None = None
    """Time since the last message, or the start."""
    started: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    async def __anext__(self) -> bytes:
        if self.count == len(self.gaps):
            raise StopAsyncIteration
        due = (self.arrived or self.started) + self.gaps[self.count]
        stall(self.stall_s)
        if time.monotonic() < self.started + self.deadline_s < due:
            await asyncio.sleep(self.started + self.deadline_s - time.monotonic())
            raise RpcError("DEADLINE_EXCEEDED", "the deadline passed")
        await asyncio.sleep(due - time.monotonic())
        self.gap_s = None if self.arrived is None else due - self.arrived
        self.arrived = due
        self.count += 1
        return b""

    async def response(self) -> bytes:
        return await self.__anext__()

    def done(self) -> bool:
        return self.count == len(self.gaps)

    def cancel(self) -> None:
        if not self.done():
            self.cancelled_after_s = time.monotonic() - (self.arrived or self.started)

    def close(self) -> None: ...
    def time_arrivals(self) -> None: ...


def abandoned(gaps: Sequence[float], *, read: int = 2, stall_s: float = 0.0, **more: bool) -> ScriptedCall:
    """Abandons a stream after its first messages."""

    async def run() -> ScriptedCall:
        call = ScriptedCall(gaps, **more)
        for _ in range(read):
            await anext(call)  # type: ignore[call-overload]
        call.stall_s = stall_s
        await abandon(call)  # type: ignore[arg-type]
        return call

    return simulated(run())


@pytest.mark.parametrize(("read", "length"), [(1, 3000), (50, 3000), (51, 3000), (500, 3000), (501, 3000), (2, 40_000)])
def test_a_stream_without_pauses_is_read_to_its_end(read: int, length: int) -> None:
    """Some responses are late because the machine is busy. Those are no pauses of the model."""
    gaps = [0.03 if number % 500 == 499 else 0.005 if number % 50 == 49 else 0.0002 for number in range(length)]
    call = abandoned(gaps, read=read)
    assert (call.count, call.cancelled_after_s) == (len(gaps), None)


@pytest.mark.parametrize(
    ("gap_s", "within_s"), [(0.005, 0.51), (0.008, 0.51), (0.02, 0.53), (0.06, 0.016), (0.2, 0.051), (5.0, 0.101)]
)
def test_a_stream_with_pauses_is_cancelled_early_in_a_pause(gap_s: float, within_s: float) -> None:
    call = abandoned([gap_s] * 200)
    assert call.cancelled_after_s is not None
    assert min(gap_s / 4, 0.1) <= call.cancelled_after_s + 1e-6 <= gap_s / 2 + 1e-3
    assert (call.count - 2) * gap_s + call.cancelled_after_s <= within_s


@pytest.mark.parametrize(
    "given", [{}, {"is_behind": True}, {"is_receiving": True}], ids=["pace", "behind", "receiving"]
)
def test_a_stream_is_cancelled_in_a_longer_pause_if_that_is_known(given: dict[str, bool]) -> None:
    """The pace of buffered messages does not predict the next response; in the middle of one is no pause at all."""
    call = abandoned([0.1, 0.1, 0.9], **given)
    assert (call.cancelled_after_s is None) is bool(given)


def test_a_stream_is_not_cancelled_late_in_a_pause() -> None:
    """A busy machine wakes the gateway too late: then it waits for the next pause, or for 100 ms."""
    call = abandoned([0.1] * 100, stall_s=0.08)
    assert (call.count, call.cancelled_after_s) == (100, None)


@pytest.mark.parametrize("gap_s", [0.005, 0.02, 0.04])
def test_a_short_stream_is_not_cancelled(gap_s: float) -> None:
    """Triton sees a cancellation some milliseconds later, which would often be together with the last response."""
    call = abandoned([gap_s] * 10)
    assert (call.count, call.cancelled_after_s) == (10, None)


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
    await abandon(call)
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
    cancelling = asyncio.create_task(abandon(call, 60.0))
    await asyncio.sleep(0.05)
    await transport.close()
    await asyncio.wait_for(cancelling, 5)


def times_of_cancellations(
    kind: str, answer_s: float, *, answers_s: float = 0.0, calls: int = 10
) -> list[float | None]:
    """Abandons calls one after the other. Returns when each was cancelled; None for a call that was answered."""

    async def run() -> list[float | None]:
        cancels, times = PacedCancels(), list[float | None]()
        for _ in range(calls):
            call = ScriptedCall([answer_s], deadline_s=0.3)
            end = cancels.end_unary if kind == "unary" else cancels.end_stream
            await end(call, "m", time.monotonic(), answers_s)  # type: ignore[arg-type]
            times.append(call.cancelled_after_s)
        return times

    return simulated(run())


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize("answer_s", [0.6, 1.1, 2.0, 4.0])
def test_late_answers_make_the_gateway_wait_longer(kind: str, answer_s: float) -> None:
    """On a busy machine, a model answers later than SETTLE_S: a cancellation would arrive together with an answer."""
    times = times_of_cancellations(kind, answer_s)
    assert times[0] == pytest.approx(SETTLE_S)
    assert times[4:] == [None] * 6


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_model_that_answers_late_is_known_from_other_calls(kind: str) -> None:
    assert times_of_cancellations(kind, 1.5, answers_s=0.9) == [None] * 10


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_silent_model_is_cancelled_after_a_bounded_time(kind: str) -> None:
    times = times_of_cancellations(kind, 3600.0)
    assert times[0] == pytest.approx(SETTLE_S)
    assert max(time or 3600.0 for time in times) == pytest.approx(LONGEST_SETTLE_S)


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_the_callers_deadline_is_no_time_for_a_cancellation(kind: str) -> None:
    """The caller leaves first, and its deadline passes while the gateway waits for the answer."""
    assert times_of_cancellations(kind, 0.4) == [None] * 10
