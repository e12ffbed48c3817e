"""Cancelling calls no faster than Triton bears."""

import asyncio
import time

import grpc

CANCELS_PER_S = 200.0
BURST = 50
"""See docs/streaming.md for the measurement behind both."""


class PacedCancels:
    """A leaky bucket: cancels go out at once up to the rate, behind each other above it."""

    def __init__(self, per_s: float = CANCELS_PER_S, burst: int = BURST) -> None:
        self._interval_s = 1.0 / per_s
        self._slack_s = burst * self._interval_s
        self._next = 0.0

    def cancel(self, call: grpc.aio.Call) -> None:
        """Does nothing to a call that is done."""
        if call.done():
            return
        wait_s = self.turn() - time.monotonic()
        if wait_s <= 0:
            call.cancel()
        else:
            asyncio.get_running_loop().call_later(wait_s, call.cancel)

    def turn(self) -> float:
        """When the next cancel may go, in monotonic seconds; takes its place in the line."""
        self._next = max(self._next, time.monotonic() - self._slack_s) + self._interval_s
        return self._next
