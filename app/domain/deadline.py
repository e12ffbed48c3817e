"""A deadline: a value that travels with a request, on the monotonic clock."""

import time
from typing import Self

from msgspec import Struct

FLOOR_S = 0.05
"""Minimum in seconds: many calls with deadlines below a millisecond crash Triton 2.51."""


class Deadline(Struct, frozen=True):
    expires_at: float
    """Seconds on ``time.monotonic``."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        return cls(time.monotonic() + max(seconds, FLOOR_S))

    def remaining_s(self) -> float:
        return max(0.0, self.expires_at - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self.expires_at
