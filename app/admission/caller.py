"""The caller of a request, as admission sees it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """The limits of one caller. None: no limit for this caller; the pipeline's limits still apply."""

    in_flight: int | None = None
    """Requests and streams that run at the same time."""
    queue: int | None = None
    """Requests that wait at the same time."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Callers with a higher ``priority`` go first; callers with the same priority take turns."""

    id: str
    """The id of the caller's key; empty if no keys are required."""
    priority: int = 0
    limits: CallerLimits = CallerLimits()


ANYONE = Caller("")
"""The caller of every request if no keys are required."""
