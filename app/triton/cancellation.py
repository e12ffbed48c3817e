"""Cancels abandoned calls at a time and at a rate that Triton can handle safely.

``cancel_unanswered`` and ``cancel_abandoned`` find the time for one unary call and one stream, ``PacedCancels`` limits
the rate of all cancellations.
docs/decisions/0008-cancellation.md has the measurements.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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


class Settling:
    """Gives one abandoned call without a response time to end without cancellation.

    That is SETTLE_S while the model answers quickly. On a busy machine it answers later, so that a cancellation after
    SETTLE_S would often arrive together with the response: then it is a multiple of the model's longest recent answer
    time, at most LONGEST_SETTLE_S.
    """

    def __init__(self, began: float, longest_s: float, note: Callable[[float], None]) -> None:
        """``began``: when the call started, in monotonic seconds. ``note``: called with the time that it took."""
        self._began = began
        self._longest_s = longest_s
        self._note: Callable[[float], None] | None = note

    def ends_at(self, due: float) -> float:
        """``due``: the earliest time of a cancellation. Both in monotonic seconds."""
        answered_by = self._began + _ANSWER_TIMES * self._longest_s
        return max(due + SETTLE_S, min(answered_by, due + LONGEST_SETTLE_S))

    def end(self) -> None:
        """Call this when the call is answered or cancelled. Only the first time counts."""
        if self._note is not None:
            self._note(time.monotonic() - self._began)
            self._note = None


async def cancel_unanswered(call: UnaryCall, cancels: "PacedCancels", settling: Settling) -> None:
    """Cancels a unary call that does not end in the time of ``settling``, when its turn has come.

    A cancellation that arrives together with the response can crash Triton 2.51.
    """
    settled = settling.ends_at(time.monotonic())
    while not call.done() and time.monotonic() < settled:
        with suppress(TimeoutError, RpcError):  # also if the caller's deadline passes, which is no safe time
            async with asyncio.timeout_at(settled):
                await call.response()
    settling.end()
    if not call.done():
        await asyncio.sleep(cancels.turn() - time.monotonic())
        call.cancel()


async def cancel_abandoned(call: StreamCall, due: float, settling: Settling) -> None:
    """Reads on, then cancels the call, not before ``due`` (monotonic seconds). A no-op if the call has ended.

    In Triton 2.51 a cancellation that arrives together with a response can overwrite the stream's state, or block all
    streams permanently: the two take the same pair of locks in opposite orders. The final response of a cancelled
    stream frees the stream's state while an earlier response may still be written. So the gateway continues to read and
    discards the responses, until a response was just read and the next response is not due, never in the middle of a
    response. It does not cancel a stream that ends without cancellation, or that never pauses: that stream is read
    until its end or its deadline. Models delay their final response to prevent the second fault, see
    ``model_kit.streaming``.
    """
    abandoned = _Abandoned(call, due, settling)
    call.time_arrivals()
    try:
        while await abandoned.has_more():
            pass
    except (StopAsyncIteration, RpcError):
        return
    finally:
        settling.end()
        call.cancel()
        call.close()


class _Abandoned:
    """The search for a safe time. ``due``: the earliest time, in monotonic seconds."""

    def __init__(self, call: StreamCall, due: float, settling: Settling) -> None:
        self._call = call
        self._settling = settling
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
        except RpcError as exc:
            if self._call.done() or exc.code != "DEADLINE_EXCEEDED":
                raise
            return True  # the caller's deadline passed, which is no safe time
        self._settling.end()
        return True

    def _safe_times(self) -> tuple[float, float]:
        """Returns the earliest and the latest time, if no message arrives before."""
        now, call = max(time.monotonic(), self._due), self._call
        if call.is_behind and call.arrived is not None:
            return now + _BEHIND_QUIET_S, inf
        if self._is_receiving:
            return now + QUIET_S, inf
        if call.arrived is None or call.gap_s is None:
            return max(now + QUIET_S, self._settling.ends_at(self._due)), inf
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
"""docs/decisions/0008-cancellation.md has the measurement."""
BURST = 50


class PacedCancels:
    """Rate-limits cancellations, because Triton 2.51 crashes under bursts.

    Cancellations within the rate are sent at once, further cancellations wait.
    """

    def __init__(self, per_s: float = CANCELS_PER_S, burst: float = BURST) -> None:
        self._bucket = LeakyBucket(per_s, burst)
        self._longest_s: dict[str, float] = {}
        """By model: the longest recent time until an abandoned call was answered or cancelled."""

    @classmethod
    def shared_by(cls, processes: int) -> "PacedCancels":
        """Returns the share of one of several processes that call the same Triton."""
        return cls(CANCELS_PER_S / processes, BURST / processes)

    def settling(self, model: str, began: float, answers_s: float) -> Settling:
        """For a call of the model. ``answers_s``: the model's longest recent answer time."""
        longest_s = max(answers_s, self._longest_s.get(model, 0.0))
        return Settling(began, longest_s, partial(self._note, model))

    def _note(self, model: str, took_s: float) -> None:
        """The time until a cancellation counts too: the model would have answered later than that."""
        self._longest_s[model] = max(took_s, _FADING * self._longest_s.get(model, 0.0))

    def turn(self) -> float:
        """Reserves the time of the next cancellation, in monotonic seconds."""
        return self._bucket.turn(time.monotonic())
