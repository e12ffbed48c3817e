"""The stores of resumable streams: what all have, the limits of what a process keeps, and the store in memory.

A stream is started once, and can be read repeatedly by its id. The limits are in bytes and in streams, in total and for
each caller. Ended streams without a reader can be evicted, so that they never keep a new stream from starting. A stream
in memory can be resumed only in the process that started it.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import ClassVar, Self

from msgspec import Struct

from app.core.errors import StreamCancelled, StreamEvicted, TooManyRequests, UnknownStream
from app.streams.stream import Event, EventLog, ReplayLog, Stream

STREAM_BYTES = 4096
"""The memory of an ended stream without its events."""
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
    """The memory that one stream uses. ``caller``: the id of its API key; empty without one.

    ``stream``: None when only its events are kept: after its end, and in Redis when they are all there.
    """

    id: str
    caller: str
    resume_s: float = 0.0
    stream: Stream | None = None
    size: int = STREAM_BYTES
    due_at: float = inf
    """When its store has to look at it, in monotonic seconds."""


@dataclass(slots=True, eq=False)
class Usage:
    """The memory that some streams use together."""

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
    """``keep_s``: the minimum time for which it is kept without a reader, if its model uses all of its time."""

    id: str
    request_id: str
    keep_s: float


def new_stream_id() -> str:
    """128 random bits. A stream id is a bearer capability: anyone who has it can read and cancel the stream."""
    return secrets.token_urlsafe(16)


UNKNOWN = "There is no such stream, or it has expired."
EVICTED = "The gateway dropped this ended stream to make room for newer ones."


@dataclass(frozen=True, slots=True)
class Reader:
    """One connection to a stream; while it is open, the stream has a reader."""

    read: Callable[[int], Awaitable[list[Event]]]
    """Waits for the events after an id, at least one. Raises StreamEvicted or UpstreamUnavailable."""
    closed: Callable[[], None]
    is_full: ClassVar = False
    """A stream does not wait for its readers."""

    async def close(self) -> None:
        self.closed()


class StreamStore(ABC):
    """Keeps streams within its limits. Ended streams without a reader are evicted for others.

    A store that several processes share also has notes: short texts by name, for all of these processes.
    """

    is_shared = False

    def __init__(self, limits: KeepLimits) -> None:
        self._quota = KeepQuota(limits)

    @property
    def usage(self) -> Usage:
        """The memory that this process uses for all of its streams."""
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


SWEEP_S = 0.2
MAX_EVICTED = 10_000
"""Evicted streams whose readers get a reason."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Kept(KeptStream):
    log: ReplayLog
    readers: int = 0

    def await_reader(self) -> None:
        self.due_at = time.monotonic() + self.resume_s


class MemoryStore(StreamStore):
    """``freed`` is called with the number of bytes of each dropped stream."""

    def __init__(self, limits: KeepLimits = KEEP_LIMITS, freed: Callable[[int], None] = lambda _size: None) -> None:
        super().__init__(limits)
        self._kept: dict[str, _Kept] = {}
        self._freed = freed
        self._evicted: dict[str, None] = {}
        """The newest ids."""

    def new_log(self) -> EventLog:
        return ReplayLog()

    async def keep(self, stream: Stream, resume_s: float, caller: str = "") -> str:
        assert isinstance(stream.log, ReplayLog), "the stream was made with this store's log"
        await self.require_room(caller)
        kept = _Kept(new_stream_id(), caller, resume_s, stream, log=stream.log)
        self._kept[kept.id] = kept
        self._quota.add(kept)
        stream.log.changed = partial(self._log_changed, kept)
        kept.await_reader()
        return kept.id

    async def reader(self, stream_id: str, after: int = 0) -> Reader | None:
        kept = self._found(stream_id)
        if not kept.log.resume(after):
            return None
        self._read_by(kept, 1)
        return Reader(kept.log.read, partial(self._read_by, kept, -1))

    async def caller_of(self, stream_id: str) -> str:
        return self._found(stream_id).caller

    async def delete(self, stream_id: str) -> None:
        kept = self._found(stream_id)
        self._forget(kept)
        if kept.stream is not None:
            kept.stream.end(StreamCancelled("The stream was cancelled with DELETE."))

    async def run(self) -> None:
        """One sweep looks at all streams: none has a timer."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for kept in [each for each in self._kept.values() if each.due_at <= now]:
                if kept.stream is None:
                    self._forget(kept)
                else:
                    kept.stream.end(StreamCancelled(f"No client read the stream for {kept.resume_s:g} s."))
                    kept.await_reader()

    def _read_by(self, kept: _Kept, readers: int) -> None:
        """Called when a reader opens (1) or closes (-1)."""
        kept.readers += readers
        if kept.id in self._kept:
            self._quota.mark(kept, evictable=kept.log.has_ended and not kept.readers)
            kept.await_reader()
        if kept.readers:
            kept.due_at = float("inf")

    async def __aexit__(self, *_: object) -> None:
        for kept in list(self._kept.values()):
            self._forget(kept)

    def _found(self, stream_id: str) -> _Kept:
        kept = self._kept.get(stream_id)
        if kept is None:
            raise StreamEvicted(EVICTED) if stream_id in self._evicted else UnknownStream(UNKNOWN)
        return kept

    def _log_changed(self, kept: _Kept) -> None:
        """Accounts for new events. Makes room for them in ended streams, otherwise in the largest stream.

        That is a stream of this caller if its share is used up.
        """
        self._account(kept)
        while self._quota.is_over(kept.caller):
            if (victim := self._quota.victim(kept.caller)) is not None:
                self._drop(victim)
                continue
            is_own = self._quota.is_share_used_up(kept.caller)
            candidates = (each for each in self._kept.values() if not is_own or each.caller == kept.caller)
            largest = max(candidates, key=lambda each: each.size)
            has_shrunk = largest.log.drop_older_half()
            self._account(largest)
            if not has_shrunk:
                break
        if kept.log.has_ended:
            kept.stream = kept.log.changed = None
            self._quota.mark(kept, evictable=not kept.readers)

    def _account(self, kept: _Kept) -> None:
        self._quota.grow(kept, STREAM_BYTES + kept.log.size - kept.size)

    async def _evict(self, victim: KeptStream) -> None:
        self._drop(victim)

    def _drop(self, victim: KeptStream) -> None:
        self._forget(self._kept[victim.id])
        self._evicted[victim.id] = None
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    def _forget(self, kept: _Kept) -> None:
        kept.log.changed = None  # a cycle, which would keep the events until the next full garbage collection
        del self._kept[kept.id]
        self._quota.remove(kept)
        self._freed(kept.size)
