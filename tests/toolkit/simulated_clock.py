"""An event loop with a simulated clock: waiting takes no time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar
from unittest.mock import patch

R = TypeVar("R")


class _Clock(selectors.SelectSelector):
    """Passes the time at once that an event loop wants to wait. All loops have the same clock."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is left that could happen"
        _Clock.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def stall(seconds: float) -> None:
    """Lets time pass while the event loop does nothing, as on a busy machine."""
    _Clock.now += seconds


def simulated(work: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine on the simulated clock."""
    loop = _Loop()
    try:
        with (
            patch("time.monotonic", loop.time),
            patch("app.admission.scheduler.monotonic", loop.time),
            patch("app.sessions.session.monotonic", loop.time),
        ):
            return loop.run_until_complete(work)
    finally:
        loop.close()


def on_a_simulated_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs each call of an asynchronous test on the simulated clock."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        simulated(test(*arguments, **named))

    return run
