"""Cancels abandoned calls at a time and at a rate that Triton can handle safely.

``cancel_abandoned`` finds the time for one stream, and ``PacedCancels`` limits the rate of all cancellations.
docs/decisions/0030-when-a-cancellation-is-sent.md has the measurements.
"""

import asyncio
import time
from collections import deque
from math import inf
from statistics import median

from app.core.aio import LeakyBucket
from app.triton.transport import Call, RpcError, StreamCall

QUIET_S = 0.1
"""A cancellation is also safe after this time without a response."""
SELF_END_S = 2.0
"""Time for a stream to end without cancellation: after its last response, or because of a ``cancel`` model."""
_STEADY_S = 0.05
"""Triton may see a cancellation so late that responses with a smaller gap than this are not far enough apart."""
SETTLE_S = 0.5
"""Time for an abandoned call to end without cancellation: most unary calls and streams of this kind are short."""
_PAUSE_S = 0.002
"""Time for Triton to finish writing a response."""
_GAPS = 9
"""Number of gaps that show whether a stream pauses. Single long gaps occur in every stream on a busy machine."""
_BEHIND_QUIET_S = 1.0
"""Time without a response after which a cancellation is safe, if it is unknown when the next response is due."""
_LONGEST_RECEIVING_S = 10.0
"""After this time, a pause counts even if the next response may have begun: grpcio shows only whole responses."""


async def cancel_abandoned(call: StreamCall, due: float) -> None:
    """Reads on, then cancels the call, not before ``due`` (monotonic seconds). A no-op if the call has ended.

    In Triton 2.51 a cancellation that arrives together with a response can overwrite the stream's state, or block all
    streams permanently: the two take the same pair of locks in opposite orders. The final response of a cancelled
    stream frees the stream's state while an earlier response may still be written. So the gateway continues to read and
    discards the responses, until a response was just read and the next response is not due, never in the middle of a
    response. It does not cancel a stream that ends without cancellation, or that never pauses: that stream is read
    until its end or its deadline. Models delay their final response to prevent the second fault, see
    ``model_kit.streaming``.
    """
    abandoned = _Abandoned(call, due)
    try:
        while await abandoned.has_more():
            pass
    except (StopAsyncIteration, RpcError):
        return
    finally:
        call.cancel()
        call.close()


class _Abandoned:
    """The search for a safe time. ``due``: the earliest time, in monotonic seconds."""

    def __init__(self, call: StreamCall, due: float) -> None:
        self._call = call
        self._due = max(time.monotonic(), due)
        self._gaps: deque[float] = deque(maxlen=_GAPS)

    async def has_more(self) -> bool:
        """Discards the next message. Returns False at a safe time."""
        earliest, latest = self._safe_times()
        try:
            async with asyncio.timeout_at(earliest):
                await anext(self._call)
        except TimeoutError:
            return self._is_receiving or time.monotonic() > latest
        return True

    def _safe_times(self) -> tuple[float, float]:
        """Returns the earliest and the latest time, if no message arrives before."""
        now, call = max(time.monotonic(), self._due), self._call
        if call.is_behind and call.arrived is not None:
            return now + _BEHIND_QUIET_S, inf
        if self._is_receiving:
            return now + QUIET_S, inf
        if call.arrived is None or call.gap_s is None:
            return max(now + QUIET_S, self._due + SETTLE_S), inf
        self._gaps.append(call.gap_s)
        typical_s = median(self._gaps)
        if min(call.gap_s, typical_s) < _STEADY_S:
            now = max(now, self._due + SETTLE_S)
        earliest = call.arrived + min(max(typical_s / 4, _PAUSE_S), QUIET_S)
        latest = earliest + max(typical_s / 4, _PAUSE_S / 2)
        if typical_s < 2 * _PAUSE_S or now > latest:
            return now + QUIET_S, inf
        return max(earliest, now), latest

    @property
    def _is_receiving(self) -> bool:
        return self._call.is_receiving and time.monotonic() < self._due + _LONGEST_RECEIVING_S


CANCELS_PER_S = 200.0
"""docs/decisions/0030-when-a-cancellation-is-sent.md has the measurement."""
BURST = 50


class PacedCancels:
    """Rate-limits cancellations, because Triton 2.51 crashes under bursts.

    Cancellations within the rate are sent at once, further cancellations wait.
    """

    def __init__(self, per_s: float = CANCELS_PER_S, burst: float = BURST) -> None:
        self._bucket = LeakyBucket(per_s, burst)

    @classmethod
    def shared_by(cls, processes: int) -> "PacedCancels":
        """Returns the share of one of several processes that call the same Triton."""
        return cls(CANCELS_PER_S / processes, BURST / processes)

    def cancel(self, call: Call) -> None:
        """Cancels a unary call that has not ended after SETTLE_S, when its turn has come.

        A cancellation that arrives together with the response can crash Triton 2.51.
        """
        asyncio.get_running_loop().call_later(SETTLE_S, self._cancel_now, call)

    def _cancel_now(self, call: Call) -> None:
        """A no-op for a call that is done."""
        if call.done():
            return
        wait_s = self.turn() - time.monotonic()
        if wait_s <= 0:
            call.cancel()
        else:
            asyncio.get_running_loop().call_later(wait_s, call.cancel)

    def turn(self) -> float:
        """Reserves the time of the next cancellation, in monotonic seconds."""
        return self._bucket.turn(time.monotonic())
