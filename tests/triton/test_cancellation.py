"""When abandoned calls are cancelled, by a simulated clock. See test_transports.py for real connections."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import pytest

from app.grpc.rpc import RpcError
from app.triton.cancellation import LONGEST_SETTLE_S, SETTLE_S, PacedCancels
from tests.toolkit.simulated_clock import simulated, stall


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
        await PacedCancels().end_stream(call, "m", time.monotonic(), 0.0)  # type: ignore[arg-type]
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
