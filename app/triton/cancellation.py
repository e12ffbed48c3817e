"""Cancels abandoned calls at a time and at a rate that Triton can handle safely.

``cancel_abandoned`` finds the time for one stream, and ``PacedCancels`` limits the rate of all cancellations.
docs/decisions/0030-when-a-cancellation-is-sent.md has the measurements.
"""

import asyncio
import time

from app.core.aio import LeakyBucket
from app.triton.transport import Call, RpcError, StreamCall

QUIET_S = 0.1
"""A cancellation is also safe after this time without a response."""
SELF_END_S = 2.0
"""Time for a stream to end without cancellation: after its last response, or because of a ``cancel`` model."""
_STEADY_S = 0.01
"""Responses with a smaller gap than this may be the last responses."""
_PAUSE_S = 0.002
"""Time for Triton to finish writing a response."""
_BEHIND_QUIET_S = 1.0
"""Time without a response after which a cancellation is safe, if it is unknown when the next response is due."""
_LONGEST_READ_S = 10.0
"""A stream of a model that never pauses is cancelled after this time."""


async def cancel_abandoned(call: StreamCall, due: float) -> None:
    """Reads on, then cancels the call, not before ``due`` (monotonic seconds). A no-op if the call has ended.

    In Triton 2.51 a cancellation that arrives together with a response can overwrite the stream's state, or block all
    streams permanently: the two take the same pair of locks in opposite orders. The final response of a cancelled
    stream frees the stream's state while an earlier response may still be written. So the gateway continues to read and
    discards the responses, until a response was just read and the next response is not due, never in the middle of a
    response. It does not cancel a stream that ends without cancellation. Models delay their final response to prevent
    the second fault, see ``model_kit.streaming``.
    """
    due = max(time.monotonic(), due)
    try:
        while time.monotonic() < due + _LONGEST_READ_S and await _has_more(call, _safe_time(call, due)):
            pass
    except (StopAsyncIteration, RpcError):
        return
    finally:
        call.cancel()
        call.close()


async def _has_more(call: StreamCall, until: float) -> bool:
    """Discards the next message. Returns False if Triton has written nothing, and is not in the middle of a message."""
    try:
        async with asyncio.timeout_at(until):
            await anext(call)
    except TimeoutError:
        return call.is_receiving
    return True


def _safe_time(call: StreamCall, due: float) -> float:
    """Returns a time shortly after the last response, and less than halfway to the expected next response."""
    now = max(time.monotonic(), due)
    if call.arrived is None:
        return now + QUIET_S
    if call.is_behind:
        return now + _BEHIND_QUIET_S
    if call.is_receiving:
        return now + QUIET_S
    gap_s = QUIET_S if call.gap_s is None else call.gap_s
    earliest = call.arrived + _bounded(gap_s / 4)
    latest = call.arrived + _bounded(gap_s / 2)
    if gap_s < _STEADY_S:
        earliest = max(earliest, due + QUIET_S)
    return max(earliest, now) if now <= max(earliest, latest) else now + QUIET_S


def _bounded(pause_s: float) -> float:
    return min(max(pause_s, _PAUSE_S), QUIET_S)


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
        """Cancels a call when its turn has come. A no-op for a call that is done."""
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
