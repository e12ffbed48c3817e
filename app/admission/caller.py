"""The caller of a request, as admission sees it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """None: no limit of its own; the pipeline's limits still apply."""

    in_flight: int | None = None
    """Requests and streams that run at a time."""
    queue: int | None = None
    """Requests that wait at a time."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Callers with a higher ``priority`` go first; callers with the same priority take turns."""

    id: str
    """Of the caller's key; empty if no key is asked for."""
    priority: int = 0
    limits: CallerLimits = CallerLimits()


ANYONE = Caller("")
"""The caller of every request if no key is asked for."""
