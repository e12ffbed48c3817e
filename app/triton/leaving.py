"""Hanging up on a stream that nobody listens to any more, at a moment that Triton bears.

A cancel that meets a response on its way can kill Triton 2.51 (it then writes where a write is pending): twenty cancels
in the midst of a flood were enough. Right behind a response, and before the next is due, thousands did no harm. So the
responses are read on, and dropped, until such a moment comes.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
from tritonclient.grpc import service_pb2

QUIET_S = 0.1
"""Without any response for so long, it is such a moment."""
_GAP_S = 0.002
_BYTES_PER_S = 50e6
"""A response that came later behind the one before it than both say left none waiting in between."""
_FLOOD_S = 10.0
"""A model that never pauses is hung up on after so long all the same."""


async def hang_up(
    call: grpc.aio.Call, messages: AsyncIterator[service_pb2.ModelStreamInferResponse], due: float
) -> None:
    """Reads on and cancels the call, not before ``due`` (monotonic seconds); does nothing to one that has ended."""
    last = time.monotonic()
    latest = max(last, due) + _FLOOD_S
    with suppress(TimeoutError, grpc.aio.AioRpcError):
        async with asyncio.timeout(QUIET_S + max(due - last, 0.0)) as quiet:
            async for message in messages:
                now = time.monotonic()
                if now >= latest or (now >= due and now - last >= _gap_s(message)):
                    break
                last = now
                quiet.reschedule(asyncio.get_running_loop().time() + QUIET_S + max(due - now, 0.0))
    call.cancel()


def _gap_s(message: service_pb2.ModelStreamInferResponse) -> float:
    return _GAP_S + float(message.ByteSize()) / _BYTES_PER_S
