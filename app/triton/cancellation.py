"""Cancels abandoned calls at a time and at a rate that Triton can handle safely.

docs/decisions/0008-cancellation.md has the measurements.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from math import inf
from statistics import median

from app.core.aio import LeakyBucket
from app.grpc.rpc import RpcError, StreamCall, UnaryCall

QUIET_S = 0.1
"""A cancellation is also safe after this time without a response."""
SELF_END_S = 2.0
"""Time for a stream to end without cancellation: after its last response, or because of a ``cancel`` model."""
_STEADY_S = 0.05
"""Triton may see a cancellation so late that responses with a smaller gap than this are not far enough apart."""
SETTLE_S = 0.5
"""Time for an abandoned call to end without cancellation: most unary calls and streams of this kind are short."""
LONGEST_SETTLE_S = 5.0
"""Upper limit of that time for a model that answers late."""
_ANSWER_TIMES = 2.0
"""A call without a response is cancelled after this many times the model's longest recent answer time."""
_FADING = 0.9
_PAUSE_S = 0.002
"""Time for Triton to finish writing a response."""
_GAPS = 9
"""Number of gaps that show whether a stream pauses. Single long gaps occur in every stream on a busy machine."""
_BEHIND_QUIET_S = 1.0
"""Time without a response after which a cancellation is safe, if it is unknown when the next response is due."""
_LONGEST_RECEIVING_S = 10.0
"""After this time, a pause counts even if the next response may have begun: grpcio shows only whole responses."""
CANCELS_PER_S = 200.0
"""docs/decisions/0008-cancellation.md has the measurement."""
BURST = 50


class PacedCancels:
    """Rate-limits cancellations, because Triton 2.51 crashes under bursts, and finds a safe time for each.

    Cancellations within the rate are sent at once, further cancellations wait. ``began``: when the call started, in
    monotonic seconds. ``answers_s``: the longest recent answer time of its model.
    """

    def __init__(self, processes: int = 1) -> None:
        """``processes``: how many call the same Triton, each with an equal share of the rate."""
        self._bucket = LeakyBucket(CANCELS_PER_S / processes, BURST / processes)
        self._longest_s: dict[str, float] = {}
        """By model: the longest recent time until an abandoned call was answered or cancelled."""

    def turn(self) -> float:
        """Reserves the time of the next cancellation, in monotonic seconds."""
        return self._bucket.turn(time.monotonic())

    async def end_unary(self, call: UnaryCall, model: str, began: float, answers_s: float) -> None:
        """Cancels a call that does not end without cancellation in the time for that.

        A cancellation that arrives together with the response can crash Triton 2.51.
        """
        settled = self._settled_at(model, began, answers_s, time.monotonic())
        while not call.done() and time.monotonic() < settled:
            with suppress(TimeoutError, RpcError):  # also if the caller's deadline passes, which is not a safe time
                async with asyncio.timeout_at(settled):
                    await call.response()
        self._note(model, began)
        if not call.done():
            await asyncio.sleep(self.turn() - time.monotonic())
            call.cancel()

    async def end_stream(
        self, call: StreamCall, model: str, began: float, answers_s: float, self_end_s: float = 0.0
    ) -> None:
        """Reads on, then cancels the call, after at least ``self_end_s``. A no-op if the call has ended.

        In Triton 2.51 a cancellation that arrives together with a response can overwrite the stream's state, or block
        all streams permanently: the two take the same pair of locks in opposite orders. The final response of a
        cancelled stream frees the stream's state while an earlier response may still be written. So the gateway
        continues to read and discards the responses, until a response was just read and the next response is not due,
        never in the middle of a response. It does not cancel a stream that ends without cancellation, or that never
        pauses: that stream is read until its end or its deadline. Models delay their final response to prevent the
        second fault, see ``model_kit.streaming``.
        """
        due = max(time.monotonic(), self.turn() + self_end_s)
        settled, gaps, is_noted = self._settled_at(model, began, answers_s, due), deque[float](maxlen=_GAPS), False
        call.time_arrivals()
        try:
            while True:
                earliest, latest = _safe_times(call, due, settled, gaps)
                try:
                    async with asyncio.timeout_at(earliest):
                        await anext(call)
                except TimeoutError:
                    if not _is_receiving(call, due) and time.monotonic() <= latest:
                        return
                except RpcError as exc:
                    if call.done() or exc.code != "DEADLINE_EXCEEDED":
                        return
                    continue  # the caller's deadline passed, which is not a safe time
                else:
                    if not is_noted:
                        is_noted = True
                        self._note(model, began)
        except StopAsyncIteration:
            return
        finally:
            if not is_noted:
                self._note(model, began)
            call.cancel()
            call.close()

    def _settled_at(self, model: str, began: float, answers_s: float, due: float) -> float:
        """When a call without a response has had its time to end without cancellation, at the earliest after ``due``.

        That is SETTLE_S while the model answers quickly. On a busy machine it answers later, so that a cancellation
        after SETTLE_S would often arrive together with the response: then it is a multiple of the model's longest
        recent answer time, at most LONGEST_SETTLE_S.
        """
        answered_by = began + _ANSWER_TIMES * max(answers_s, self._longest_s.get(model, 0.0))
        return max(due + SETTLE_S, min(answered_by, due + LONGEST_SETTLE_S))

    def _note(self, model: str, began: float) -> None:
        """The time until a cancellation counts too: the model would have answered later than that."""
        took_s = time.monotonic() - began
        self._longest_s[model] = max(took_s, _FADING * self._longest_s.get(model, 0.0))


def _safe_times(call: StreamCall, due: float, settled: float, gaps: deque[float]) -> tuple[float, float]:
    """Returns the earliest and the latest time for a cancellation, if no message arrives before."""
    now = max(time.monotonic(), due)
    if call.is_behind and call.arrived is not None:
        return now + _BEHIND_QUIET_S, inf
    if _is_receiving(call, due):
        return now + QUIET_S, inf
    if call.arrived is None or call.gap_s is None:
        return max(now + QUIET_S, settled), inf
    gaps.append(call.gap_s)
    typical_s = median(gaps)
    if min(call.gap_s, typical_s) < _STEADY_S:
        now = max(now, due + SETTLE_S)
    earliest = call.arrived + min(max(typical_s / 4, _PAUSE_S), QUIET_S)
    latest = earliest + max(typical_s / 4, _PAUSE_S / 2)
    if typical_s < 2 * _PAUSE_S or now > latest:
        return now + QUIET_S, inf
    return max(earliest, now), latest


def _is_receiving(call: StreamCall, due: float) -> bool:
    return call.is_receiving and time.monotonic() < due + _LONGEST_RECEIVING_S
