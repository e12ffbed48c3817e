"""Waits for a condition instead of a fixed time. Only a test that fails waits until the end."""

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""How long a test waits for what takes a moment on an idle machine, so that a busy machine makes it slow, not red."""


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    ends, pause_s = time.monotonic() + within_s, 0.01
    while not condition():
        assert time.monotonic() < ends, f"the condition is still false after {within_s} s"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)
