"""Cancels an abandoned stream at a time when Triton can handle it safely.

In Triton 2.51 a cancellation that arrives together with a response can overwrite the stream's state, or block all
streams for ever: the two take the same pair of locks in opposite orders. The final response of a cancelled stream frees
the stream's state while an earlier response may still be written. So the gateway keeps reading and drops the responses,
until a response was just read and the next response is not due. It does not cancel a stream that ends by itself. Models
delay their final response to prevent the second fault, see ``model_kit.streaming``; docs/streaming.md has the
measurements.
"""

import asyncio
import time
from collections import deque

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from app.domain.errors import GatewayError
from app.triton.errors import triton_errors

QUIET_S = 0.1
"""After a silence of this length a cancellation is safe too."""
SELF_END_S = 2.0
"""Time for a stream to end by itself, after its last response or by a ``cancel`` model: its FINAL is not delayed."""
_STEADY_S = 0.01
"""Responses that arrive closer together than this may be the last responses."""
_PAUSE_S = 0.002
"""Time for Triton to finish writing a response."""
_WAITED_S = 0.005
"""A message that took this long to come was not in a buffer before: the reader is up to date."""
_BEHIND_QUIET_S = 1.0
"""The silence after which a cancellation is safe while it is unknown when the next response is due."""
_PREFETCH_BYTES = 16 * 1024
"""Prefetch limit in bytes; always at least one message."""
_LONGEST_READ_S = 10.0
"""A stream of a model that never pauses is cancelled after this time."""


class Messages:
    """Reads the messages of a call in a task of its own, and prefetches a few.

    With grpc.aio alone, cancelling the task that waits for a message cancels the call at once.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.arrived: float | None = None
        """Time of the last message, in monotonic seconds."""
        self.gap_s = QUIET_S
        """Time between the last two messages."""
        self.is_behind = False
        """Whether older messages still wait in buffers, so that their arrival says nothing about the model's pace."""
        self._prefetched: deque[tuple[service_pb2.ModelStreamInferResponse, int]] = deque()
        self._prefetched_bytes = 0
        self._end: Exception | None = None
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(call))

    def __aiter__(self) -> "Messages":
        return self

    async def __anext__(self) -> service_pb2.ModelStreamInferResponse:
        while not self._prefetched:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        message, size = self._prefetched.popleft()
        if self._prefetched_bytes >= _PREFETCH_BYTES:
            self._changed.set()
        self._prefetched_bytes -= size
        return message

    def close(self) -> None:
        """Stops reading, and drops the prefetched messages."""
        self._reading.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            asked = time.monotonic()
            while (message := await call.read()) is not grpc.aio.EOF:
                if message is None:
                    raise DecodeError("gRPC could not parse a message")
                self._note_arrival(asked)
                size = message.ByteSize()
                self._prefetched.append((message, size))
                self._prefetched_bytes += size
                del message  # frees the memory before the next message arrives
                self._changed.set()
                while self._prefetched_bytes >= _PREFETCH_BYTES:
                    self._changed.clear()
                    await self._changed.wait()
                asked = time.monotonic()
                self.is_behind |= asked - (self.arrived or asked) > _WAITED_S
            self._end = StopAsyncIteration()
        except asyncio.CancelledError:
            self._end = grpc.aio.UsageError("The channel was closed.")
        except Exception as exc:
            self._end = exc
        self._changed.set()

    def _note_arrival(self, asked: float) -> None:
        now = time.monotonic()
        self.is_behind = self.is_behind and now - asked < _WAITED_S
        if self.arrived is not None:
            self.gap_s = now - self.arrived
        self.arrived = now


async def cancel_abandoned(call: grpc.aio.Call, messages: Messages, due: float) -> None:
    """Keeps reading, then cancels the call, not before ``due`` (monotonic seconds). A no-op where the call ended."""
    due = max(time.monotonic(), due)
    try:
        while time.monotonic() < due + _LONGEST_READ_S:
            async with asyncio.timeout_at(_safe_time(messages, due)):
                with triton_errors():
                    await anext(messages)
    except (StopAsyncIteration, TimeoutError, GatewayError):
        return
    finally:
        call.cancel()
        messages.close()


def _safe_time(messages: Messages, due: float) -> float:
    """After the last response, and before the middle of the time to the next response, if the pace stays the same."""
    now = max(time.monotonic(), due)
    if messages.arrived is None:
        return now + QUIET_S
    if messages.is_behind:
        return now + _BEHIND_QUIET_S
    earliest = messages.arrived + _bounded(messages.gap_s / 4)
    latest = messages.arrived + _bounded(messages.gap_s / 2)
    if messages.gap_s < _STEADY_S:
        earliest = max(earliest, due + QUIET_S)
    return max(earliest, now) if now <= max(earliest, latest) else now + QUIET_S


def _bounded(pause_s: float) -> float:
    return min(max(pause_s, _PAUSE_S), QUIET_S)
