"""The port to stores of resumable streams, and the limits of what a process keeps for them.

A stream is started once, and can be read repeatedly by its id. The limits are in bytes and in streams, in total and for
each caller. Ended streams without a reader can be evicted, so that they never keep a new stream from starting.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Self

from msgspec import Struct

from app.core.errors import StreamEvicted, TooManyRequests, UnknownStream
from app.streams.events import Event, EventLog, ReplayLog
from app.streams.stream import Stream

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
        self.total = Usage(limits)
        self._callers: dict[str, Usage] = {}

    def add(self, kept: KeptStream) -> None:
        if kept.caller not in self._callers:
            limits, share = self.total.limits, CALLER_SHARE if kept.caller else 1.0
            own = KeepLimits(int(limits.max_bytes * share), max(1, int(limits.max_streams * share)))
            self._callers[kept.caller] = Usage(own)
        for usage in (self.total, self._callers[kept.caller]):
            usage.streams += 1
            usage.size += kept.size

    def grow(self, kept: KeptStream, size: int) -> None:
        """``size``: in bytes; negative if the stream dropped more than it added."""
        for each in (kept, self.total, self._callers[kept.caller]):
            each.size += size

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


class StartedStream(Struct, frozen=True):
    """``keep_s``: how long it is kept at least if its model uses all of its time, and nobody reads it."""

    id: str
    request_id: str
    keep_s: float


def new_stream_id() -> str:
    """128 random bits. A stream id is a bearer capability: anyone who has it can read and cancel the stream."""
    return secrets.token_urlsafe(16)


def unknown() -> UnknownStream:
    return UnknownStream("There is no such stream, or it has expired.")


def evicted() -> StreamEvicted:
    return StreamEvicted("The gateway dropped this ended stream to make room for newer ones.")


class Reader:
    """One connection to a stream; while it is open, the stream has a reader."""

    is_full = False
    """A stream does not wait for its readers."""

    def __init__(self, log: ReplayLog, closed: Callable[[], None]) -> None:
        self._log = log
        self._closed = closed

    async def read(self, after: int) -> list[Event]:
        """Waits for the events after ``after``, at least one. Raises StreamEvicted or UpstreamUnavailable."""
        return await self._log.read(after)

    async def close(self) -> None:
        self._closed()


class StreamStore(ABC):
    """Keeps streams within its limits. Ended streams without a reader are evicted for others.

    A store that several processes share also has notes: short texts by name, for all of these processes.
    """

    is_shared = False

    def __init__(self, limits: KeepLimits) -> None:
        self._quota = KeepQuota(limits)

    @property
    def usage(self) -> Usage:
        """What this process keeps for all of its streams."""
        return self._quota.total

    @abstractmethod
    def new_log(self) -> EventLog:
        """Creates the log of a stream for :meth:`keep`."""

    async def require_room(self, caller: str) -> None:
        """Checks whether a further stream can be kept. Call it before the stream takes a slot of its model.

        Raises TooManyRequests or UpstreamUnavailable.
        """
        if not await self._make_room(caller, streams=1):
            raise self._quota.refusal(caller)

    async def _make_room(self, caller: str, streams: int = 0, size: int = 0) -> bool:
        """Evicts streams until these further streams and bytes fit. Returns whether they do."""
        while self._quota.is_over(caller, streams, size):
            victim = self._quota.victim(caller, streams, size)
            if victim is None:
                return False
            await self._evict(victim)
        return True

    @abstractmethod
    async def _evict(self, victim: KeptStream) -> None:
        """Drops an ended stream, or marks it as not evictable if it has a reader."""

    @abstractmethod
    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        """Stores a stream before its start and returns its id. Raises TooManyRequests or UpstreamUnavailable.

        ``caller``: the id of the API key that starts the stream; empty without one.
        After ``resume_s`` seconds without a reader, a running stream is ended and an ended stream is deleted.
        """

    @abstractmethod
    async def reader(self, stream_id: str, after: int = 0) -> Reader | None:
        """A reader of the events after ``after``; None if the stream has ended and has no such event.

        Raises UnknownStream, StreamEvicted if the next event has been dropped, InvalidRequest if ``after`` was never
        sent, or UpstreamUnavailable.
        """

    @abstractmethod
    async def caller_of(self, stream_id: str) -> str:
        """The id of the API key that started the stream; empty without one.

        Raises UnknownStream, StreamEvicted or UpstreamUnavailable.
        """

    async def has(self, stream_id: str) -> bool:
        """Raises UpstreamUnavailable."""
        try:
            await self.caller_of(stream_id)
        except (UnknownStream, StreamEvicted):
            return False
        return True

    @abstractmethod
    async def delete(self, stream_id: str) -> None:
        """Ends and deletes a stream. Raises UnknownStream, StreamEvicted or UpstreamUnavailable."""

    @abstractmethod
    async def run(self) -> None:
        """Runs the store's background work until it is cancelled. Raises unexpected exceptions."""

    async def claim_note(self, name: str, note: bytes, keep_s: float) -> bytes | None:
        """Writes a note unless there is one. Returns the one that is there. Raises UpstreamUnavailable."""
        raise NotImplementedError

    async def replace_note(self, name: str, before: bytes, after: bytes, keep_s: float = 0.0) -> None:
        """Replaces a note if it is still ``before``. An empty ``after`` removes it. Raises UpstreamUnavailable."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Does not wait for the store: without it, the gateway serves everything but resumable streams."""
        return self

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...
