"""Hanging up on a model that nobody listens to any more.

A gRPC cancel that meets a response on its way can kill Triton 2.51: twenty cancels in the midst of a flood were enough.
Right behind a response, and before the next is due, hundreds a second did no harm. So the responses are read on, and
dropped, until such a moment comes.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

from app.domain.errors import GatewayError
from app.domain.inference import InferenceResponse

QUIET_S = 0.1
"""Without any response for so long, it is such a moment."""
_GAP_S = 0.002
_BYTES_PER_S = 50e6
"""A response that came later behind the one before it than both say left none waiting in between."""
_FLOOD_S = 10.0
"""A model that never pauses is hung up on after so long all the same."""


async def hang_up(responses: AsyncGenerator[InferenceResponse]) -> None:
    """Reads on until it is a good moment to close ``responses``; never raises a GatewayError."""
    last = time.monotonic()
    latest = last + _FLOOD_S
    with suppress(TimeoutError, GatewayError):
        async with asyncio.timeout(QUIET_S) as quiet:
            async for response in responses:
                now = time.monotonic()
                if now - last >= _gap_s(response) or now >= latest:
                    return
                last = now
                quiet.reschedule(asyncio.get_running_loop().time() + QUIET_S)


def _gap_s(response: InferenceResponse) -> float:
    return _GAP_S + sum(tensor.array.nbytes for tensor in response.outputs.values()) / _BYTES_PER_S
