"""Hanging up on a stream that nobody listens to any more, at a moment that Triton bears.

In Triton 2.51 a cancel that comes together with a response can overwrite the stream's state, or stop all streams for
good: the two take the same pair of locks in opposite orders. And the final response of a cancelled stream frees its
state while an earlier one may still be in writing. So the responses are read on, and dropped, until one was just read
and the next is far; a stream that ends without being cancelled is left to end. Models hold their final response back
for the other half, see ``model_kit.streaming``; docs/streaming.md has the measurements.
"""

import asyncio
import time
from collections import deque

import grpc
from tritonclient.grpc import service_pb2

QUIET_S = 0.1
"""Without any response for so long, it is such a moment too."""
PATIENCE_S = 2.0
"""For a stream that ends by itself, after its last response or by a ``cancel`` model: nothing holds back its end."""
_STEADY_S = 0.01
"""Responses that come closer together may be the last ones."""
_PAUSE_S = 0.002
"""After a response, for its write to be done in Triton too."""
_AHEAD_BYTES = 16 * 1024
"""Read ahead of who takes them; one message at least."""
_FLOOD_S = 10.0
"""A model that never pauses is hung up on after so long all the same."""


class Messages:
    """The messages of a call, read by a task of their own, so that who waits for one may be cancelled.

    With grpc.aio alone that would cancel the call, at whatever moment it is. A few are read ahead of who takes them.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.arrived: float | None = None
        """When the last message came, in monotonic seconds."""
        self.gap_s = QUIET_S
        """Between the last message and the one before it."""
        self._ahead: deque[tuple[service_pb2.ModelStreamInferResponse, int]] = deque()
        self._ahead_bytes = 0
        self._end: BaseException | None = None
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(call))

    def __aiter__(self) -> "Messages":
        return self

    async def __anext__(self) -> service_pb2.ModelStreamInferResponse:
        while not self._ahead:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        message, size = self._ahead.popleft()
        if self._ahead_bytes >= _AHEAD_BYTES:
            self._changed.set()
        self._ahead_bytes -= size
        return message

    def close(self) -> None:
        """Reads no more, and lets go of what nobody took."""
        self._reading.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._note_arrival()
                size = message.ByteSize()
                self._ahead.append((message, size))
                self._ahead_bytes += size
                del message  # or it would stay until the next one comes
                self._changed.set()
                while self._ahead_bytes >= _AHEAD_BYTES:
                    self._changed.clear()
                    await self._changed.wait()
            self._end = StopAsyncIteration()
        except BaseException as exc:
            self._end = exc
        self._changed.set()

    def _note_arrival(self) -> None:
        now = time.monotonic()
        if self.arrived is not None:
            self.gap_s = now - self.arrived
        self.arrived = now


async def hang_up(call: grpc.aio.Call, messages: Messages, due: float) -> None:
    """Reads on and cancels the call, not before ``due`` (monotonic seconds); does nothing to one that has ended."""
    due = max(time.monotonic(), due)
    try:
        while time.monotonic() < due + _FLOOD_S:
            async with asyncio.timeout_at(_good_moment(messages, due)):
                await anext(messages)
    except (StopAsyncIteration, TimeoutError, grpc.aio.AioRpcError):
        return
    finally:
        call.cancel()
        messages.close()


def _good_moment(messages: Messages, due: float) -> float:
    """Behind the last response, and not past the middle to the next, if it comes as soon as the last one did."""
    now = max(time.monotonic(), due)
    if messages.arrived is None:
        return now + QUIET_S
    earliest = messages.arrived + _bounded(messages.gap_s / 4)
    latest = messages.arrived + _bounded(messages.gap_s / 2)
    if messages.gap_s < _STEADY_S:
        earliest = max(earliest, due + QUIET_S)
    return max(earliest, now) if now <= max(earliest, latest) else now + QUIET_S


def _bounded(pause_s: float) -> float:
    return min(max(pause_s, _PAUSE_S), QUIET_S)
