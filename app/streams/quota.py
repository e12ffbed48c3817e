"""Limits what a process keeps for resumable streams, in bytes and in streams, in total and for each caller.

Ended streams without a reader can be evicted, so that they never keep a new stream from starting.
"""

from dataclasses import dataclass, field
from math import inf

from app.core.errors import StreamEvicted, TooManyRequests

STREAM_BYTES = 4096
"""What an ended stream needs in memory besides its events."""
CALLER_SHARE = 0.5
"""The part of both limits that the streams of one API key may use."""


@dataclass(frozen=True, slots=True)
class KeepLimits:
    """``max_bytes``: of the events, with STREAM_BYTES for each stream."""

    max_bytes: int = 256 * 1024 * 1024
    max_streams: int = 20_000


KEEP_LIMITS = KeepLimits()


@dataclass(slots=True, eq=False)
class KeptStream:
    """What one stream uses. ``caller``: the id of its API key; empty without one."""

    id: str
    caller: str
    size: int = STREAM_BYTES
    due_at: float = inf
    """When its store has to look at it, in monotonic seconds."""


@dataclass(slots=True, eq=False)
class Usage:
    """What some streams use together."""

    limits: KeepLimits
    size: int = 0
    streams: int = 0
    evictable: dict[KeptStream, None] = field(default_factory=dict)
    """The oldest first."""

    def is_over(self, streams: int, size: int) -> bool:
        """Whether a limit leaves no room for this number of further streams and bytes."""
        too_large = self.size + streams * STREAM_BYTES + size > self.limits.max_bytes
        return too_large or self.streams + streams > self.limits.max_streams


class KeepQuota:
    """The usage of all streams of a process, and of those of each caller.

    Requests without an API key count as one caller, which may use everything.
    """

    def __init__(self, limits: KeepLimits) -> None:
        self._limits = limits
        self.total = Usage(limits)
        self._callers: dict[str, Usage] = {}

    def add(self, kept: KeptStream) -> None:
        if kept.caller not in self._callers:
            limits, share = self._limits, CALLER_SHARE if kept.caller else 1.0
            own = KeepLimits(int(limits.max_bytes * share), max(1, int(limits.max_streams * share)))
            self._callers[kept.caller] = Usage(own)
        for usage in (self.total, self._callers[kept.caller]):
            usage.streams += 1
            usage.size += kept.size

    def grow(self, kept: KeptStream, size: int) -> None:
        """``size``: in bytes; negative if the stream dropped more than it added."""
        kept.size += size
        self.total.size += size
        self._callers[kept.caller].size += size

    def mark(self, kept: KeptStream, *, evictable: bool) -> None:
        """An evictable stream has ended and has no reader."""
        for usage in (self.total, self._callers[kept.caller]):
            if evictable:
                usage.evictable[kept] = None
            else:
                usage.evictable.pop(kept, None)

    def remove(self, kept: KeptStream) -> None:
        self.mark(kept, evictable=False)
        for usage in (self.total, self._callers[kept.caller]):
            usage.streams -= 1
            usage.size -= kept.size
        if not self._callers[kept.caller].streams:
            del self._callers[kept.caller]

    def is_over(self, caller: str, streams: int = 0, size: int = 0) -> bool:
        """Whether a limit leaves no room for this number of further streams and bytes of the caller."""
        return self.total.is_over(streams, size) or self.is_share_used_up(caller, streams, size)

    def is_share_used_up(self, caller: str, streams: int = 0, size: int = 0) -> bool:
        usage = self._callers.get(caller)
        return usage is not None and usage.is_over(streams, size)

    def victim(self, caller: str, streams: int = 0, size: int = 0) -> KeptStream | None:
        """The stream to evict first if :meth:`is_over`; None if no eviction helps.

        It is the oldest of this caller if its own share is used up, else the oldest of the caller with the most bytes.
        """
        if self.is_share_used_up(caller, streams, size):
            return next(iter(self._callers[caller].evictable), None)
        others = (each for each in self._callers.values() if each.evictable)
        largest = max(others, key=lambda each: each.size, default=None)
        return next(iter(largest.evictable)) if largest is not None else None

    def refusal(self, caller: str) -> TooManyRequests:
        """The error for a stream that does not fit although nothing can be evicted."""
        if caller and self.is_share_used_up(caller, streams=1):
            return TooManyRequests(
                "The streams of this API key use up its share of the memory for resumable streams.",
                hint="Read the running streams to their end or delete them.",
            )
        return TooManyRequests(
            "The running streams use up the memory for resumable streams.",
            hint="Read or delete streams, or raise GATEWAY_MAX_KEPT_BYTES and GATEWAY_MAX_KEPT_STREAMS.",
        )


def evicted() -> StreamEvicted:
    return StreamEvicted("The gateway dropped this ended stream to make room for newer ones.")
