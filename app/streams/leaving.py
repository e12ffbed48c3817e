"""When to hang up on a model that nobody listens to any more.

A gRPC cancel that meets a response on its way can kill Triton 2.51: twenty cancels in the midst of a flood were enough.
Right behind a response, and before the next is due, hundreds a second did no harm. So the responses are read on, and
dropped, until such a moment comes.
"""

import time

QUIET_S = 0.1
"""Without any response for so long, it is such a moment."""
_GAP_S = 0.002
"""A response that came so long behind the one before it left none waiting in between."""
_FLOOD_S = 10.0
"""A model that never pauses is hung up on after so long all the same."""


class Leaving:
    def __init__(self) -> None:
        self._last = time.monotonic()
        self._latest = self._last + _FLOOD_S

    def is_due(self) -> bool:
        """Asked behind each response."""
        now = time.monotonic()
        gap_s, self._last = now - self._last, now
        return gap_s >= _GAP_S or now >= self._latest
