"""Counts running and waiting requests against their limits: per pipeline, per caller, or per caller and pipeline."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.admission.model_queue import ModelQueue

UNLIMITED = sys.maxsize


class Account:
    __slots__ = ("max_running", "max_waiting", "model_queues", "of_key", "running", "waiting")

    def __init__(self, max_running: int | None = None, max_waiting: int | None = None, *, of_key: bool = False) -> None:
        """``of_key``: whether the account is that of an API key, and not of a pipeline."""
        self.of_key = of_key
        self.running = 0
        self.waiting = 0
        self.model_queues: set[ModelQueue] = set()
        """The queues in which requests of this account wait."""
        self.set_limits(max_running, max_waiting)

    def set_limits(self, max_running: int | None, max_waiting: int | None) -> None:
        """Sets both limits; None means no limit."""
        self.max_running = UNLIMITED if max_running is None else max_running
        self.max_waiting = UNLIMITED if max_waiting is None else max_waiting

    @property
    def is_limited(self) -> bool:
        """Whether requests may have to wait because of this account's limit."""
        return self.max_running != UNLIMITED
